"""How to serve a bundle: options of `serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.options import YEARS, option


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens, and how it stops."""

    host: str = option("address to serve on", "ADDRESS", default="127.0.0.1")
    port: int = option(
        "port of OpenAI's API, or of Triton's HTTP; 0 lets the system choose one", "PORT", most="65535", default=8000
    )  # fmt: skip
    grace: float = option(
        "time for requests to finish after a signal to stop", "SECONDS", most=YEARS, default=30.0
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Address):
    """How to serve a bundle with OpenAI's API.

    keys: API keys; none lets everyone in. engine: `AsyncLLM`'s arguments. limit: requests in flight at most. log_level:
    of the server itself; "info" logs each request.
    """

    drain: float = option(
        "time after SIGTERM in which requests are still taken while /ready is 503, before --grace", "SECONDS",
        most=YEARS, default=0.0,
    )  # fmt: skip
    name: str | None = option(
        "the model's name for clients (default: the directory's)", "NAME", flag="--served-model-name", default=None
    )  # fmt: skip
    certificate: Path | None = option("certificate chain, for HTTPS", "FILE", flag="--tls-cert", default=None)
    certificate_key: Path | None = option(
        "private key of the certificate", "FILE", flag="--tls-key", default=None
    )
    origins: list[str] = option(
        "an origin whose pages may call the API, or '*'; may be repeated (default: none)", "ORIGIN",
        flag="--cors-origin", default_factory=list,
    )  # fmt: skip
    hosts: list[str] = option(
        "a name that clients may have for this server besides localhost, IP addresses and --host, or '*'; may be "
        "repeated. With API keys and another address than loopback every name is allowed", "NAME",
        flag="--allowed-host", default_factory=list,
    )  # fmt: skip
    priorities: bool = option(
        "let requests choose their priority, -100 to 100; one step is worth a second in the queue",
        flag="--allow-priority", default=False,
    )  # fmt: skip
    max_body: int | None = option(
        "the longest body of a request (default: 1 MiB and 64 bytes per token of the context)", "BYTES",
        least=1, default=None,
    )  # fmt: skip
    max_seconds: float | None = option(
        "the longest time that a request may take, with its time in the queue (default: as it asks)", "SECONDS",
        flag="--max-deadline", most=YEARS, default=None,
    )  # fmt: skip
    log_prompts: Path | None = option(
        "keep the messages of chats there, for `dflash-trt fit --prompts`; whoever reads it knows what users asked "
        "(default: nothing is kept)", "FILE", default=None,
    )  # fmt: skip
    prompt_details: bool = option(
        "show clients how many tokens of their prompt were cached; without keys, or with one key for several clients, "
        "this tells them what others have sent (default: only with several keys)",
        flag="--enable-prompt-tokens-details", default=False,
    )  # fmt: skip
    keys: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    limit: int = 264
    log_level: str = "info"

    @property
    def shows_cached_tokens(self) -> bool:
        """Whether clients see how many tokens of their prompts were cached: those of several keys, or as asked for."""
        return self.prompt_details or len(set(self.keys)) > 1
