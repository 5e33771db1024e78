"""Minutes of mixed load on a server, while its engine and then its backend process are killed.

    python -m build_scripts.soak.server BUNDLE [--seconds 600] [--clients 24] [--seed 0]

Needs the environment of the server tests (make .venv-server/installed). Clients over gRPC and HTTP send random
requests: streams, whole answers, with and without drafting, deadlines, cancellations, and wrong requests. gRPC
clients keep their connections. The engine process is killed after a third of the time, the backend process after two
thirds.

Every request must be answered, refused or cut off within a minute. A complete answer must equal the engine's own.
Resident memory of the server's processes is read at intervals. The last line is one JSON document. Exit code 1 if a
request hung or a token was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from build_scripts.soak.common import random_prompts, resident_of, server_options
from dflash_trt import LLM, SamplingParams
from server_tests.serving import Serving, fetch, kill, tensors

PROMPTS, LONGEST, HANGING_SECONDS = 32, 48, 60
WRONG: list[dict[str, Any]] = [
    {"text_input": ""},
    {"text_input": "a", "temperature": -3.0},
    {"text_input": "a", "max_tokens": 0},
    {"text_input": b"\xff\xfe"},
    {"input_ids": [10**8]},
    {"text_input": "a", "input_ids": [1]},
    {"text_input": "a" * 100_000},
]
PROCESSES = {"server": "bin/tritonserver", "backend": "backends/python/triton", "engine": "serving.worker"}


def main() -> int:
    args = server_options(__doc__)
    rng = random.Random(args.seed)
    prompts = random_prompts(rng, PROMPTS)
    params = [
        SamplingParams(max_tokens=LONGEST, temperature=rng.choice((0.0, 1.0)), seed=i, ignore_eos=True)
        for i in range(PROMPTS)
    ]
    with LLM(args.bundle, threads=1) as llm:
        expected = [c.token_ids for c in llm.generate(prompts, params, speculate=False)]
    with tempfile.TemporaryDirectory() as directory:
        server = Serving(args.bundle, Path(directory) / "log", "--max-queue=8", "--threads=1")
        try:
            result = asyncio.run(Soak(args, server, prompts, params, expected).run())
        finally:
            stopped = server.stop()
    print(json.dumps(result | {"exit_code": stopped}))
    return int(bool(result["wrong"] or result["hung"] or stopped))


class Soak:
    def __init__(
        self,
        args: argparse.Namespace,
        server: Serving,
        prompts: list[str],
        params: list[SamplingParams],
        expected: list[list[int]],
    ) -> None:
        self.args, self.server, self.prompts, self.params, self.expected = (
            args,
            server,
            prompts,
            params,
            expected,
        )
        self.ends, self.wrong, self.hung = Counter[str](), 0, 0
        self.rng = random.Random(args.seed + 1)
        self.end = time.monotonic() + args.seconds
        self.memory: list[dict[str, float]] = []

    async def run(self) -> dict[str, Any]:
        watch = asyncio.create_task(self.watch())
        clients = [self.client(http=n % 4 == 3) for n in range(self.args.clients)]
        await asyncio.gather(*clients, self.killer())
        watch.cancel()
        await asyncio.sleep(2)
        metrics = {name: self.server.metric(f"dflash_num_requests_{name}") for name in ("running", "waiting")}
        return {
            "seconds": self.args.seconds,
            "requests": sum(self.ends.values()),
            "ends": dict(self.ends.most_common()),
            "wrong": self.wrong,
            "hung": self.hung,
            "left_behind": metrics,
            "resident_mb": self.memory,
        }

    async def client(self, *, http: bool) -> None:
        async with aio.InferenceServerClient(self.server.grpc) as connection:
            while time.monotonic() < self.end:
                try:
                    async with asyncio.timeout(HANGING_SECONDS):
                        self.ends[await (self.over_http() if http else self.over_grpc(connection))] += 1
                except TimeoutError:
                    self.hung += 1
                await asyncio.sleep(self.rng.uniform(0, 0.1))

    def request(self) -> tuple[dict[str, Any], int]:
        """A request's fields, and the number of its prompt; -1 for a wrong request."""
        if self.rng.random() < 0.15:
            return dict(self.rng.choice(WRONG)), -1
        which = self.rng.randrange(PROMPTS)
        params, most = self.params[which], self.rng.randint(1, LONGEST)
        fields: dict[str, Any] = {"text_input": self.prompts[which], "max_tokens": most, "ignore_eos": True}
        fields |= {"temperature": params.temperature, "seed": which, "stream": self.rng.random() < 0.6}
        return fields | {"speculate": self.rng.random() < 0.8}, which

    def check(self, which: int, got: list[int], fields: dict[str, Any], reason: str) -> str:
        expected = self.expected[which][: fields["max_tokens"]]
        self.wrong += got != (expected if reason == "length" else expected[: len(got)])
        return reason

    async def over_grpc(self, connection: Any) -> str:
        fields, which = self.request()
        leave = self.rng.choice((None, None, None, 0, 2)) if which >= 0 else None
        timeout = self.rng.choice((None, None, 1, 20_000, 200_000))
        got: list[int] = []
        reason = "cut off"

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "dflash", "inputs": tensors(**fields), "timeout": timeout}
            if leave is not None:  # keep the stream open until it is cancelled
                await asyncio.sleep(HANGING_SECONDS)

        answers = connection.stream_infer(requests())
        try:
            async for result, error in answers:
                if error is not None:
                    return refusal(str(error.message()), which)
                got += result.as_numpy("output_ids")[0].tolist()
                end = result.as_numpy("finish_reason")
                if end is not None:
                    reason = end[0, 0].decode()
                    if leave is not None:
                        break
                elif leave is not None and (leave := leave - 1) < 0:
                    return self.check(which, got, fields, "left")
        except (InferenceServerException, grpc.RpcError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return "cut off"
        finally:
            answers.cancel()
        return self.check(which, got, fields, reason) if which >= 0 else "WRONG TAKEN"

    async def over_http(self) -> str:
        fields, which = self.request()
        if any(isinstance(value, bytes) for value in fields.values()):
            fields = {"text_input": "a", "top_p": 7.0}
        fields["stream"] = False
        url = f"http://127.0.0.1:{self.server.http_port}/v2/models/dflash/generate"
        status, text = await asyncio.to_thread(fetch, url, fields)
        if status == 0:
            return "cut off"
        answer = json.loads(text)
        if "error" in answer:
            return refusal(answer["error"], which)
        ids = answer["output_ids"]
        return self.check(which, ids if isinstance(ids, list) else [ids], fields, answer["finish_reason"])

    async def killer(self) -> None:
        """Kill the engine, then the backend, and wait each time until the server serves again."""
        for what in ("engine", "backend"):
            await asyncio.sleep(self.args.seconds / 3)
            for pid in self.server.processes(PROCESSES[what]):
                kill(pid)
            print(f"killed the {what}", flush=True)
            await asyncio.sleep(2)
            begin = time.monotonic()
            while not await asyncio.to_thread(self.server.ready):
                await asyncio.sleep(0.2)
            print(f"ready again after {2 + time.monotonic() - begin:.1f} s", flush=True)

    async def watch(self) -> None:
        while True:
            sizes_now = {}
            for name, mark in PROCESSES.items():
                sizes = [resident_of(pid) for pid in self.server.processes(mark)]
                sizes_now[name] = round(max(sizes, default=0.0), 1)
            self.memory.append(sizes_now)
            print(f"{sum(self.ends.values())} requests, {sizes_now}", flush=True)
            await asyncio.sleep(max(self.args.seconds / 30, 1))


def refusal(message: str, which: int) -> str:
    if "in flight, the most" in message:
        return "refused: queue is full"
    if which < 0:
        return "refused: wrong"
    return (
        "refused: no engine"
        if re.search("engine process|no available|not healthy", message)
        else f"? {message[:60]}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
