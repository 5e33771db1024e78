"""What an engine process and the server in front of it say to each other: lines of JSON on a socket.

The engine process is dflash_trt/serving/worker.py. The servers are that of OpenAI's API (dflash_trt/serving/openai) and
the Triton model, beside which `deploy` copies this file: Triton's Python may have numpy alone. So this imports the
standard library only.

The engine process first says `Ready`, and nothing more until it is asked. The server says one object per line: an
`EngineRequest` with its id, {"cancel": id}, {"id": id, "ask": "metrics"}, or {"watch": "metrics"}. The answers are
lists of [id, `Update`], and after a watch ["metrics", samples] every second. The end of input ends the engine process.
Triton's model says {"end": true} before it: without that its process has died, and the engine ends tritonserver.
SIGTERM cancels all requests. SIGINT is left to the server.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

WORKER: tuple[str, ...] = ("-P", "-m", "dflash_trt.serving.worker")  # arguments of Python
# Pause before a restart: doubled each time, until what was started has served for STEADY_SECONDS.
FIRST_PAUSE, LONGEST_PAUSE, STEADY_SECONDS = 0.25, 30.0, 60.0
MAX_STEP = 300.0  # seconds for a round or a chunk of a prompt, which no real one takes

Code = Literal["INVALID_ARG", "BUSY", "UNAVAILABLE", "CANCELLED", "DEADLINE", "INTERNAL"]


class Ready(TypedDict, total=False):
    """The first line. fatal: why the bundle cannot be served; without it the engine is ready.

    longest_line: bytes of a line that the engine accepts. key: of the bundle's manifest.
    """

    ready: bool
    fatal: str
    longest_line: int
    key: str


class EngineRequest(TypedDict, total=False):
    """A request. Every field but `params` and the prompt has the default of `AsyncLLM`.

    prompt: a text or token ids; without it there are `messages`, with the variables of their template.
    like, others: the id of an earlier request that has the other fields, and how many later ones will name this one.
    params: fields of SamplingParams. n: sequences, each of which has an `index`.
    logit_bias: pairs, because the keys of JSON's objects are texts. bias_words: the same for words of one token.
    end_id: one more end token; -1: none. echo: whether the first update has the prompt.
    """

    id: int
    like: int
    others: int
    prompt: str | list[int]
    messages: list[Any]
    chat_template_kwargs: dict[str, Any]
    params: dict[str, Any]
    n: int
    logit_bias: list[tuple[int, float]]
    bias_words: list[tuple[str, float]]
    end_id: int
    stream: bool
    echo: bool
    speculate: bool
    block_length: int | None
    tree_nodes: int | None
    priority: int
    cache_salt: str
    timeout: float | None


class Error(TypedDict):
    """field: the engine's name of the field at fault, which is among the text's first words; None: of no field."""

    code: Code
    text: str
    field: str | None


class Update(TypedDict, total=False):
    """A part of one sequence, or an error, which ends the request.

    The fields are those of `Chunk` and its statistics under the same names. The first updates have those of the prompt,
    the last one those from `finish_reason` on.
    times: arrival, start of prefill, first token and last token, in nanoseconds since the epoch.
    metrics: the answer to "ask", in Prometheus' text format.
    """

    index: int
    text: str
    token_ids: list[int]
    rounds: list[tuple[int, int, int, int]]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    num_input_tokens: int
    echo: tuple[str, list[int]]
    prompt_logprobs: list[float | None]
    prompt_top_logprobs: list[list[tuple[int, float]]]
    prompt_ranks: list[int | None]
    finish_reason: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_cached_tokens: int
    acceptance_histogram: list[int]
    times: list[int]
    error: Error
    metrics: str


def refusal(code: Code, text: str, field: str | None = None) -> Update:
    """The update that ends a request with an error."""
    return {"error": {"code": code, "text": text, "field": field}}


# The fields of an update that go on in later ones.
GROWING = (
    "text", "token_ids", "rounds", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs",
    "prompt_ranks",
)  # fmt: skip


def merge(earlier: Update, later: Update) -> None:
    """Add a later update of a sequence to an earlier one."""
    whole: Any = earlier
    for key, value in later.items():
        added = key in whole and key in GROWING
        whole[key] = whole[key] + value if added else value


def line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lines:
    """The lines of one side, from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def push(self, data: bytes) -> list[Any]:
        """The values of the lines that end in a piece."""
        *ends, rest = data.split(b"\n")
        values = []
        for end in ends:
            values.append(json.loads(b"".join([*self._parts, end])))
            self._parts.clear()
        if rest:
            self._parts.append(rest)
        return values


def command(python: str, connection: socket.socket, settings: Mapping[str, Any]) -> list[str]:
    """The command that starts an engine process. settings: `AsyncLLM`'s arguments, as JSON has them."""
    return [python, *WORKER, str(connection.fileno()), json.dumps(settings)]


def next_pause(pause: float, served: float = 0.0) -> float:
    """Seconds until a restart, after the pause before. served: for how many seconds it has served since then."""
    return FIRST_PAUSE if served > STEADY_SECONDS else min(2 * pause, LONGEST_PAUSE)


def how_it_ended(code: int) -> str:
    """A process' exit code in words, or the name of the signal that ended it."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def max_request_bytes(max_seq_len: int) -> int:
    """The longest body or message that a server takes from a client: 64 bytes per prompt token, as JSON or protobuf,
    and 1 MiB for the rest.
    """
    return (1 << 20) + 64 * max_seq_len
