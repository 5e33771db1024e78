"""Honest clients of `dflash-trt serve` beside hostile ones: does an honest request get lost, wrong or slower?

    python -m build_scripts.soak.attack_server BUNDLE [--seconds 600] [--turn 15]

Needs the environment of the server tests (make .venv-server/installed). Honest clients request known texts over HTTP
and gRPC. Hostile ones join every other turn, so that a slow moment of the machine affects both. They are a process of
lower priority (nice 5), because real ones would run on another machine. Each repeats one kind of attack: malformed,
slow, huge, nested or chunked HTTP; closed APIs; garbage, huge or compressed messages over gRPC; connections that end
abruptly.

The last line is one JSON document. Exit code 1 if an honest request was lost or wrong, a hostile one hung, code was
executed, or the server was restarted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from tritonclient.grpc import aio

from build_scripts.harness import greedy_or_sampled, known_answers, options, report, resident_of
from dflash_trt.decoding.metrics import quantiles
from dflash_trt.decoding.params import SamplingParams
from server_tests.serving import Serving, tensors

PROMPTS, TOKENS, HONEST, HANGING_SECONDS = 16, 24, 4, 60
GENERATE = b"POST /v2/models/dflash/generate HTTP/1.1\r\nHost: x\r\n"
METHOD = "/inference.GRPCInferenceService/"
# Prompts with their parameters and the tokens of their answers.
Known = list[tuple[str, SamplingParams, list[int]]]
Attack = Callable[["Target", random.Random], Awaitable[str]]


@dataclass(frozen=True)
class Target:
    """The address of a server, and the file that injected code would write."""

    http_port: int
    grpc_port: int
    marker: str


async def send(port: int, *parts: bytes, pause: float = 0.0, abrupt: bool = False) -> str:
    """Send the parts one after the other over a connection. Returns the status, or how the connection ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        if abrupt:
            writer.transport.abort()
            return "left"
        said = await reader.read(64)
        return said.split(b" ")[1].decode() if said.startswith(b"HTTP/1") else "closed"
    except ConnectionError:
        return "closed"
    finally:
        writer.close()


def with_length(body: bytes) -> bytes:
    """A whole request with this body."""
    return GENERATE + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _malformed(target: Target, rng: random.Random) -> str:
    head = bytearray(GENERATE + b"Content-Length: 3\r\nX: a\r\n\r\n{}\n")
    for _ in range(rng.randint(1, 6)):
        head[rng.randrange(len(head))] = rng.randrange(256)
    return await send(target.http_port, bytes(head) + b"\r\n\r\n", pause=0.2, abrupt=rng.random() < 0.5)


async def _slow(target: Target, rng: random.Random) -> str:
    start = GENERATE if rng.random() < 0.5 else GENERATE + b"Content-Length: 90000\r\n\r\n"
    return await send(target.http_port, start, *[b"X: a\r\n"] * 60, pause=1.0)


async def _chunked(target: Target, _: random.Random) -> str:
    head = GENERATE + b"Transfer-Encoding: chunked\r\n\r\n"
    return await send(target.http_port, head, b"1\r\nA\r\n" * 600_000)


async def _nested(target: Target, _: random.Random) -> str:
    body = b'{"text_input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return await send(target.http_port, with_length(body))


async def _huge(target: Target, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return await send(target.http_port, GENERATE + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n")
    return await send(target.http_port, GENERATE + b"Content-Length: 99999999\r\n\r\n", b"a" * 2_000_000)


async def _closed_paths(target: Target, rng: random.Random) -> str:
    code = f"import pathlib\npathlib.Path({target.marker!r}).touch()\n"
    load = json.dumps({"parameters": {"config": '{"backend": "python"}', "file:1/model.py": code}}).encode()
    path = rng.choice(
        [
            "repository/models/evil/load", "repository/models/dflash/unload", "repository/index", "logging",
            "systemsharedmemory/region/a/register", "trace/setting", "models/dflash/trace/setting",
            "models/dflash/../../repository/models/dflash/unload", "models/dflash%2f..%2f../repository/index",
        ]
    )  # fmt: skip
    head = f"POST /v2/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(load)}\r\n\r\n"
    return await send(target.http_port, head.encode() + load)


async def _abrupt(target: Target, rng: random.Random) -> str:
    body = json.dumps({"text_input": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}).encode()
    data = with_length(body).replace(b"generate", b"generate_stream", 1)
    data = data[: rng.randint(1, 2 * len(data))]
    return await send(target.http_port, data, pause=rng.random() / 5, abrupt=True)


async def _garbage(target: Target, rng: random.Random) -> str:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if rng.random() < 0.7 else b""
    return await send(target.grpc_port, preface + rng.randbytes(2000), pause=0.2, abrupt=rng.random() < 0.5)


async def call(target: Target, method: str, message: bytes, **options: Any) -> str:
    """The status of one call over gRPC."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}", **options) as channel:
        try:
            await channel.unary_unary(METHOD + method)(message, timeout=HANGING_SECONDS)
            return "OK"
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)


async def _closed_methods(target: Target, rng: random.Random) -> str:
    methods = ("RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "LogSettings")
    return await call(target, rng.choice(methods), b"\x12\x06dflash")


async def _messages(target: Target, rng: random.Random) -> str:
    """A message that is malformed, too long, or 200 times as long as it looks."""
    if rng.random() < 0.6:
        return await call(target, "ModelInfer", b"\x0a\x06dflash" + rng.randbytes(rng.randint(0, 400)))
    return await call(target, "ModelInfer", b"\0" * 5_000_000, compression=grpc.Compression.Gzip)


# Seconds between two attacks of a kind, and the number of attackers.
ATTACKS: dict[str, tuple[Attack, float, int]] = {
    "malformed": (_malformed, 0.3, 2),
    "slow": (_slow, 0.1, 60),
    "chunked": (_chunked, 2.0, 1),
    "nested": (_nested, 0.5, 1),
    "huge": (_huge, 1.0, 1),
    "closed paths": (_closed_paths, 0.2, 2),
    "abrupt": (_abrupt, 1.0, 1),
    "garbage": (_garbage, 0.5, 2),
    "closed methods": (_closed_methods, 0.5, 1),
    "messages": (_messages, 1.0, 1),
}


async def attack(target: Target) -> None:
    """Attack until standard input ends. Each line there starts or ends a turn. Prints the outcome of each attempt."""
    ends: dict[str, Counter[str]] = {name: Counter() for name in ATTACKS}
    on = asyncio.Event()
    rng = random.Random(0)

    async def one(name: str) -> None:
        action, pause, _ = ATTACKS[name]
        while True:
            await on.wait()
            end = "HUNG"
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * HANGING_SECONDS):
                    end = await action(target, rng)
            ends[name][end] += 1
            await asyncio.sleep(rng.expovariate(1 / pause))

    tasks = [asyncio.create_task(one(name)) for name, (_, _, n) in ATTACKS.items() for _ in range(n)]
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        (on.set if line == "on" else on.clear)()
    on.clear()
    await asyncio.sleep(0)
    failed = [repr(task.exception()) for task in tasks if task.done()]
    result = {"ends": {name: dict(counter) for name, counter in ends.items()}, "failed": failed}
    print(json.dumps(result), flush=True)
    os._exit(0)  # open connections need not be waited for


@dataclass
class Honest:
    """The outcome of the honest requests: seconds of requests alone, and of those beside hostile ones."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "beside": []})
    lost: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Figures of the report."""
        figures: dict[str, Any] = {"lost": dict(self.lost), "wrong": self.wrong}
        for name, seconds in self.seconds.items():
            figures[name] = {f"{p}_ms": round(1e3 * value, 1) for p, value in quantiles(seconds).items()}
            figures[name] |= {
                "requests": len(seconds),
                "mean_ms": round(1e3 * sum(seconds) / len(seconds), 1),
            }
        alone, beside = figures["alone"], figures["beside"]
        figures["slowed"] = {k: round(beside[k] / alone[k], 2) for k in alone if k != "requests"}
        return figures


async def run(server: Serving, known: Known, seconds: float, turn: float, marker: Path) -> dict[str, Any]:
    """Turns of honest clients alone and beside hostile ones, for half of the time each."""
    target = Target(server.http_port, server.grpc_port, str(marker))
    words = [str(target.http_port), str(target.grpc_port), target.marker]
    hostile = await asyncio.create_subprocess_exec(
        *("nice", "-n", "5", sys.executable, "-m", "build_scripts.soak.attack_server", "--target", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert hostile.stdin is not None
    honest, now = Honest(), ["alone"]
    end = time.monotonic() + seconds
    (triton,) = server.processes("bin/tritonserver")
    memory = []
    clients = [asyncio.create_task(client(n, server, known, honest, now, end)) for n in range(HONEST)]
    while time.monotonic() < end:
        for now[0], order in (("alone", b"off\n"), ("beside", b"on\n")):
            hostile.stdin.write(order)
            await asyncio.sleep(min(turn, max(end - time.monotonic(), 0)))
        memory.append([round(resident_of(pid)) for pid in (server.process.pid, triton)])
    await asyncio.gather(*clients)
    hostile.stdin.close()
    out, _ = await asyncio.wait_for(hostile.communicate(), 4 * HANGING_SECONDS)
    same = server.process.poll() is None and server.processes("bin/tritonserver") == [triton]
    return {
        "honest": honest.to_dict(),
        "hostile": json.loads(out),
        "executed": marker.exists(),
        "same_processes": same,
        "resident_mb": {"proxy": [m[0] for m in memory], "tritonserver": [m[1] for m in memory]},
    }


async def client(
    number: int, server: Serving, known: Known, honest: Honest, now: list[str], end: float
) -> None:
    """One honest client, over HTTP or gRPC, with streams or whole answers.

    A request counts for a turn if it began and ended in it.
    """
    rng = random.Random(number)
    async with aio.InferenceServerClient(server.grpc) as connection, aiohttp.ClientSession() as session:
        while time.monotonic() < end:
            prompt, params, expected = rng.choice(known)
            fields = {"text_input": prompt, "max_tokens": TOKENS, "ignore_eos": True, "seed": params.seed}
            fields |= {"temperature": params.temperature, "stream": number % 4 < 2}
            begin, turn = time.monotonic(), now[0]
            try:
                async with asyncio.timeout(HANGING_SECONDS):
                    http = number % 2
                    got = await (
                        over_http(session, server, fields) if http else over_grpc(connection, fields)
                    )
                honest.wrong += got != expected
            except Exception as error:
                honest.lost[f"{type(error).__name__}: {str(error)[:80]}"] += 1
            if now[0] == turn:
                honest.seconds[turn].append(time.monotonic() - begin)
            await asyncio.sleep(rng.uniform(0, 0.2))


async def over_grpc(connection: Any, fields: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "dflash", "inputs": tensors(**fields)}

    tokens: list[int] = []
    async for result, error in connection.stream_infer(requests()):
        if error is not None:
            raise error
        tokens += result.as_numpy("output_ids")[0].tolist()
    return tokens


async def over_http(session: aiohttp.ClientSession, server: Serving, fields: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    url = f"http://127.0.0.1:{server.http_port}/v2/models/dflash/generate"
    tokens: list[int] = []
    async with session.post(url + "_stream" * fields["stream"], json=fields) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.strip():
                ids = json.loads(line.removeprefix(b"data: "))["output_ids"]
                tokens += ids if isinstance(ids, list) else [ids]
    return tokens


def questions(bundle: Path, seed: int = 0) -> Known:
    """What honest clients ask, and the tokens that they must get."""
    prompts = [f"def f{n}(a, b):" for n in range(PROMPTS)]
    params = greedy_or_sampled(random.Random(seed), PROMPTS, TOKENS)
    answers = [done.token_ids for done in known_answers(bundle, prompts, params)]
    return list(zip(prompts, params, answers, strict=True))


def failures(result: dict[str, Any]) -> list[str]:
    """Descriptions of everything that must not have happened."""
    honest, hostile = result["honest"], result["hostile"]
    faults = [f"honest requests lost: {honest['lost']}"] * bool(honest["lost"])
    faults += [f"honest answers wrong: {honest['wrong']}"] * bool(honest["wrong"])
    faults += [f"{name} hung" for name, ends in hostile["ends"].items() if "HUNG" in ends]
    faults += ["nothing was tried"] * (not any(hostile["ends"].values()))
    faults += [f"the attack failed: {hostile['failed']}"] * bool(hostile["failed"])
    faults += ["code of a client was executed"] * result["executed"]
    faults += ["a process was restarted"] * (not result["same_processes"])
    return faults


def main() -> int:
    """Run the server and both kinds of clients."""
    if sys.argv[1:2] == ["--target"]:
        http_port, grpc_port, marker = sys.argv[2:]
        asyncio.run(attack(Target(int(http_port), int(grpc_port), marker)))
    args = options(__doc__, seconds=600.0, turn=15.0).parse_args()
    known = questions(args.bundle, args.seed)
    with tempfile.TemporaryDirectory() as directory:
        server = Serving(args.bundle, Path(directory) / "log", "--threads=1")
        try:
            executed = Path(directory) / "executed"
            result = asyncio.run(run(server, known, args.seconds, args.turn, executed))
        finally:
            stopped = server.stop()
    return report(result, failures(result) + [f"serve ended with {stopped}"] * bool(stopped))


if __name__ == "__main__":
    raise SystemExit(main())
