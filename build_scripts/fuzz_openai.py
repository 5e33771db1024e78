"""Malformed bodies and headers for a server of OpenAI's API: does one end in a 500, in silence, or in lost memory?

    python -m build_scripts.fuzz_openai BUNDLE [--requests 20000] [--burst 10000] [--seed 0]

Each request is a valid one with a field, a header or some bytes changed. With --burst, so many connections are opened
at once instead, each with one valid request. The last line is one JSON document: answers by status, requests without an
answer, and resident memory of the server's processes.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
from collections import Counter
from typing import Any

from build_scripts.harness import openai_server, options, report

AT_ONCE, SECONDS = 32, 180.0  # the machine may be busy
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True, "n": 1, "stop": ["x"],
        "seed": 1,
    },
    "/v1/completions": {
        "prompt": "Hello", "max_tokens": 2, "temperature": 0.5, "logit_bias": {"5": 1}, "logprobs": 1,
    },
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2, "tools": []},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**64, -(2**70), 1e308, -0.0, 0.5, "", "x", "\x00", "\ud7ff", "é" * 300, [], {},
    [[]], [None], ["x"] * 50, {"x": 1}, [{}], {"type": "json_object"}, {"type": "json_schema"}, [[1, 2], [3]],
    {"regex": "("}, {"json": "{"}, {"grammar": "start: "}, {"choice": []}, [{"role": "tool", "content": None}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}], "required", {"a": {"b": [1]}},
]  # fmt: skip
NAMES = (
    "messages", "prompt", "input", "tokens", "model", "max_tokens", "min_tokens", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "bad_words", "n", "logprobs", "top_logprobs", "logit_bias", "echo",
    "stream", "stream_options", "tools", "tool_choice", "response_format", "structured_outputs", "timeout", "priority",
    "block_length", "tree_nodes", "speculate", "return_rounds", "chat_template_kwargs", "reasoning_effort", "unknown",
    "allowed_token_ids", "documents", "text", "add_special_tokens", "length_penalty", "metadata", "instructions",
    "truncation", "include", "reasoning",
)  # fmt: skip
HEADERS = (
    b"Content-Length: -1", b"Content-Length: 99999999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue",
    b"Content-Type: text/plain", b"X-Request-Id: " + b"x" * 5000, b"Authorization: Bearer \xff", b"Host:",
    b"Host: a.example", b": empty", b"Connection: Upgrade\r\nUpgrade: websocket", b"Accept-Encoding: gzip",
    b"Content-Encoding: gzip",
)  # fmt: skip


def changed(rng: random.Random) -> bytes:
    """One request, with `Connection: close`."""
    path = rng.choice(list(BODIES))
    body = dict(BODIES[path])
    kind = rng.randrange(4)
    for _ in range(rng.randint(1, 3) if kind < 2 else 0):
        body[rng.choice(NAMES)] = rng.choice(VALUES)
    text = bytearray(json.dumps(body).encode())
    if kind == 2:
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
    headers = [b"Host: localhost", b"Connection: close", b"Content-Type: application/json"]
    headers.append(f"Content-Length: {len(text)}".encode())
    if kind == 3:
        headers[rng.randrange(1, len(headers)) :] = [rng.choice(HEADERS), b"Connection: close"]
    method = rng.choice((b"POST", b"POST", b"POST", b"GET", b"BREW"))
    return b"\r\n".join([method + b" " + path.encode() + b" HTTP/1.1", *headers, b"", b""]) + bytes(text)


def valid() -> bytes:
    """One request that is answered."""
    text = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head + f"Content-Length: {len(text)}\r\n\r\n".encode() + text


async def ask(port: int, request: bytes) -> str:
    """The status of the answer, or why there is none."""
    writer = None
    try:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            if writer.can_write_eof() and b"chunked" in request:
                writer.write_eof()  # the server waits for the rest of such a body
            answer = await reader.read()
        return answer[9:12].decode("latin-1") or "closed"
    except TimeoutError:
        return "silence"
    except OSError:
        return "closed"
    finally:
        if writer is not None:
            writer.close()


def main() -> int:
    """Send the requests, or open the connections."""
    args = options(__doc__, requests=20_000, burst=0).parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rng = random.Random(args.seed)
    requests = [valid()] * args.burst or [changed(rng) for _ in range(args.requests)]
    counts, faults, memory = Counter[str](), list[str](), list[dict[str, float]]()

    async def send(port: int, some: list[bytes]) -> None:
        gate = asyncio.Semaphore(args.burst or AT_ONCE)

        async def one(request: bytes) -> None:
            async with gate:
                status = await ask(port, request)
            counts[status] += 1
            if status in ("500", "silence"):
                faults.append(f"{status}: {request[-300:]!r}")

        await asyncio.gather(*map(one, some))

    with openai_server(args.bundle, "--threads=1") as server:
        step = args.burst or 1000
        for start in range(0, len(requests), step):
            asyncio.run(send(server.port, requests[start : start + step]))
            memory.append(server.resident())
    figures = {"answers": dict(sorted(counts.items())), "resident_mb": memory, **server.stopped}
    return report(figures, faults + ["the exit code"] * bool(server.stopped["exit_code"]))


if __name__ == "__main__":
    raise SystemExit(main())
