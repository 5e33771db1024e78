"""Malformed bodies and headers for a server of OpenAI's API: does one end in a 500, in silence, or in lost memory?

    python -m build_scripts.soak.fuzz_openai URL PID [--requests 20000] [--burst 10000]

URL is of a running `dflash-trt serve`, PID its process. Each request is a valid one with a field, a header or some
bytes changed. With --burst, so many connections are opened at once instead, each with one valid request. The last line
is one JSON document: answers by status, requests without an answer, and resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_AT_ONCE, _SECONDS = 32, 180.0  # the machine may be busy
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
_MESSAGES = [{"role": "user", "content": "Hello"}]
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": _MESSAGES,
        "max_tokens": 2,
        "stream": True,
        "n": 1,
        "stop": ["x"],
        "seed": 1,
    },
    "/v1/completions": {
        "prompt": "Hello",
        "max_tokens": 2,
        "temperature": 0.5,
        "logit_bias": {"5": 1},
        "logprobs": 1,
    },
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2, "tools": []},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
}
_VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**64,
        -(2**70),
        1e308,
        -0.0,
        0.5,
        "",
        "x",
        "\x00",
        "\ud7ff",
        "é" * 300,
        [],
        {},
    ),
    *(
        [[]],
        [None],
        ["x"] * 50,
        {"x": 1},
        [{}],
        {"type": "json_object"},
        {"type": "json_schema"},
        [[1, 2], [3]],
    ),
    *(
        {"regex": "("},
        {"json": "{"},
        {"grammar": "start: "},
        {"choice": []},
        [{"role": "tool", "content": None}],
    ),
    *(
        [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
        "required",
        {"a": {"b": [1]}},
    ),
]
_NAMES = (
    *(
        "messages",
        "prompt",
        "input",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
    ),
    *(
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "echo",
        "stream",
        "stream_options",
        "tools",
        "tool_choice",
    ),
    *(
        "response_format",
        "structured_outputs",
        "timeout",
        "priority",
        "block_length",
        "tree_nodes",
        "speculate",
        "min_tokens",
    ),
    *(
        "chat_template_kwargs",
        "reasoning_effort",
        "return_rounds",
        "bad_words",
        "stop_token_ids",
        "tokens",
        "unknown",
    ),
)
_HEADERS = (
    *(
        b"Content-Length: -1",
        b"Content-Length: 99999999999999",
        b"Transfer-Encoding: chunked",
        b"Expect: 100-continue",
    ),
    *(
        b"Content-Type: text/plain",
        b"X-Request-Id: " + b"x" * 5000,
        b"Authorization: Bearer \xff",
        b"Host:",
        b"Host: a.example",
        b": empty",
    ),
    *(b"Connection: Upgrade\r\nUpgrade: websocket", b"Accept-Encoding: gzip", b"Content-Encoding: gzip"),
)


def changed(rng: random.Random) -> bytes:
    """One request, with `Connection: close`."""
    path = rng.choice(_PATHS)
    body = dict(_BODIES[path])
    kind = rng.randrange(4)
    for _ in range(rng.randint(1, 3) if kind < 2 else 0):
        body[rng.choice(_NAMES)] = rng.choice(_VALUES)
    text = bytearray(json.dumps(body).encode())
    if kind == 2:
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 3)] = bytes(rng.randrange(256) for _ in range(rng.randint(0, 3)))
    headers = [
        b"Host: localhost",
        b"Connection: close",
        b"Content-Type: application/json",
        f"Content-Length: {len(text)}".encode(),
    ]
    if kind == 3:
        headers[rng.randrange(1, len(headers)) :] = [rng.choice(_HEADERS), b"Connection: close"]
    method = rng.choice((b"POST", b"POST", b"POST", b"GET", b"BREW"))
    return b"\r\n".join([method + b" " + path.encode() + b" HTTP/1.1", *headers, b"", b""]) + bytes(text)


async def ask(host: str, port: int, request: bytes) -> str:
    """The status of the answer, or why there is none."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(_SECONDS):
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
        writer.close()


def resident(pid: int) -> int:
    """Resident memory in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


async def run(host: str, port: int, pid: int, requests: int, seed: int) -> dict[str, Any]:
    rng, counts, bad = random.Random(seed), Counter[str](), list[str]()
    gate = asyncio.Semaphore(_AT_ONCE)
    memory = []

    async def one(request: bytes) -> None:
        async with gate:
            status = await ask(host, port, request)
        counts[status] += 1
        if status in ("500", "silence") and len(bad) < 10:
            bad.append(f"{status}: {request[-300:]!r}")

    for start in range(0, requests, 1000):
        await asyncio.gather(*(one(changed(rng)) for _ in range(min(1000, requests - start))))
        memory.append(resident(pid))
    return {"answers": dict(sorted(counts.items())), "bad": bad, "resident_kib": memory}


async def burst(host: str, port: int, pid: int, connections: int) -> dict[str, Any]:
    """Open all connections at once, each with one request."""
    text = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\nContent-Type: application/json\r\n"
    request = head + f"Content-Length: {len(text)}\r\n\r\n".encode() + text

    async def one() -> str:
        try:
            return await ask(host, port, request)
        except OSError:  # the system refuses the connection
            return "closed"

    counts = Counter(await asyncio.gather(*(one() for _ in range(connections))))
    silent = ["silence"] * counts["silence"]
    return {"answers": dict(sorted(counts.items())), "bad": silent[:1], "resident_kib": [resident(pid)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("pid", type=int)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--burst", type=int, metavar="CONNECTIONS")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    url = urlsplit(args.url)
    place = url.hostname or "127.0.0.1", url.port or 8000, args.pid
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    figures = asyncio.run(burst(*place, args.burst) if args.burst else run(*place, args.requests, args.seed))
    print(json.dumps(figures))
    return 1 if figures["bad"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
