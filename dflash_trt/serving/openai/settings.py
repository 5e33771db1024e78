"""How to serve a bundle: options of `serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dflash_trt.options import YEARS, Option


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens, and how it stops."""

    host: Annotated[str, Option(metavar="ADDRESS", help="address to serve on")] = "127.0.0.1"
    port: Annotated[
        int,
        Option(
            metavar="PORT",
            most="65535",
            help="port of OpenAI's API, or of Triton's HTTP; 0 lets the system choose one",
        ),
    ] = 8000
    grace: Annotated[
        float,
        Option(metavar="SECONDS", most=YEARS, help="time for requests to finish after a signal to stop"),
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Address):
    """How to serve a bundle with OpenAI's API.

    keys: API keys; none lets everyone in. engine: `AsyncLLM`'s arguments. limit: requests in flight at most. log_level:
    of the server itself; "info" logs each request.
    """

    drain: Annotated[
        float,
        Option(
            metavar="SECONDS",
            most=YEARS,
            help="time after SIGTERM in which requests are still taken while /ready is 503, before --grace",
        ),
    ] = 0.0
    name: Annotated[
        str | None,
        Option(
            flag="--served-model-name",
            metavar="NAME",
            help="the model's name for clients (default: the directory's)",
        ),
    ] = None
    certificate: Annotated[
        Path | None, Option(flag="--tls-cert", metavar="FILE", help="certificate chain, for HTTPS")
    ] = None
    certificate_key: Annotated[
        Path | None, Option(flag="--tls-key", metavar="FILE", help="private key of the certificate")
    ] = None
    origins: Annotated[
        list[str],
        Option(
            flag="--cors-origin",
            metavar="ORIGIN",
            help="an origin whose pages may call the API, or '*'; may be repeated (default: none)",
        ),
    ] = field(default_factory=list)
    hosts: Annotated[
        list[str],
        Option(
            flag="--allowed-host",
            metavar="NAME",
            help="a name that clients may have for this server besides localhost, IP addresses and --host, or '*'; may "
            "be repeated. With API keys and another address than loopback every name is allowed",
        ),
    ] = field(default_factory=list)
    priorities: Annotated[
        bool,
        Option(
            flag="--allow-priority",
            help="let requests choose their priority, -100 to 100; one step is worth a second in the queue",
        ),
    ] = False
    max_body: Annotated[
        int | None,
        Option(
            metavar="BYTES",
            least=1,
            help="the longest body of a request (default: 1 MiB and 64 bytes per token of the context)",
        ),
    ] = None
    max_seconds: Annotated[
        float | None,
        Option(
            flag="--max-deadline",
            metavar="SECONDS",
            most=YEARS,
            help="the longest time that a request may take, with its time in the queue (default: as it asks)",
        ),
    ] = None
    log_prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="keep the messages of chats there, for `dflash-trt fit --prompts`; whoever reads it knows what users "
            "asked (default: nothing is kept)",
        ),
    ] = None
    prompt_details: Annotated[
        bool,
        Option(
            flag="--enable-prompt-tokens-details",
            help="show clients how many tokens of their prompt were cached; without keys, or with one key for several "
            "clients, this tells them what others have sent (default: only with several keys)",
        ),
    ] = False
    keys: list[str] = field(default_factory=list)
    engine: dict[str, Any] = field(default_factory=dict)
    limit: int = 264
    log_level: str = "info"

    @property
    def shows_cached_tokens(self) -> bool:
        """Whether clients see how many tokens of their prompts were cached: those of several keys, or as asked for."""
        return self.prompt_details or len(set(self.keys)) > 1
