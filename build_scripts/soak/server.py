"""Minutes of mixed load on tritonserver: its answers, and its memory.

    python -m build_scripts.soak.server BUNDLE [--seconds 1200] [--clients 24] [--kills 0] [--seed 0]

Needs the environment of the server tests (make .venv-server/installed). Clients over gRPC and HTTP send random
requests: streams, whole answers, with and without drafting, deadlines, cancellations, prompts that no other request
has, and wrong requests. gRPC clients keep their connections. The engine process is killed `--kills` times at equal
distances.

Every request must be answered, refused or cut off within a minute. A complete answer must equal the engine's own.
Without kills, the memory of all processes must stay flat once the prefix cache is full. The last line is one JSON
document. Exit code 1 if a request hung, a token was wrong, or memory grew.
"""

from __future__ import annotations

import asyncio
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

from build_scripts.harness import (
    greedy_or_sampled,
    known_answers,
    options,
    random_prompts,
    report,
    resident_of,
)
from build_scripts.soak.memory import Memory
from dflash_trt import SamplingParams
from server_tests.serving import Serving, kill, tensors

PROMPTS, LONGEST, HANGING_SECONDS = 32, 48, 60
WRONG: list[dict[str, Any]] = [
    {"text_input": ""}, {"text_input": "a", "temperature": -3.0}, {"text_input": "a", "max_tokens": 0},
    {"text_input": b"\xff\xfe"}, {"input_ids": [10**8]}, {"text_input": "a", "input_ids": [1]},
    {"text_input": "a" * 100_000},
]  # fmt: skip
PROCESSES = {"server": "bin/tritonserver", "backend": "backends/python/triton", "engine": "serving.worker"}


def main() -> int:
    """Run the server and its clients."""
    args = options(__doc__, seconds=1200.0, clients=24, kills=0).parse_args()
    rng = random.Random(args.seed)
    prompts, params = random_prompts(rng, PROMPTS), greedy_or_sampled(rng, PROMPTS, LONGEST)
    expected = [done.token_ids for done in known_answers(args.bundle, prompts, params)]
    with tempfile.TemporaryDirectory() as directory:
        server = Serving(args.bundle, Path(directory) / "log", "--max-queue=8", "--threads=1")
        try:
            load = TritonLoad(server, prompts, params, expected, args.seed)
            load.memory = Memory(
                load.sizes, lambda: server.get("/metrics", server.metrics_port)[1], kills=args.kills > 0
            )
            figures = asyncio.run(load.run(args.seconds, args.clients, args.kills))
        finally:
            stopped = server.stop()
    faults = [*load.faults, *load.memory.faults(), *["the exit code"] * bool(stopped)]
    return report(figures | {"exit_code": stopped}, faults)


class TritonLoad:
    """The clients of one server, and what became of their requests."""

    memory: Memory

    def __init__(
        self,
        server: Serving,
        prompts: list[str],
        params: list[SamplingParams],
        expected: list[list[int]],
        seed: int,
    ) -> None:
        self.server, self.prompts, self.params, self.expected = server, prompts, params, expected
        self.ends, self.faults = Counter[str](), list[str]()
        self.rng = random.Random(seed + 1)

    async def run(self, seconds: float, clients: int, kills: int) -> dict[str, Any]:
        """Send requests for so long. Returns the figures."""
        self.end = time.monotonic() + seconds
        watch = asyncio.create_task(self.memory.watch(max(seconds / 60, 1)))
        each = [self.client(http=n % 4 == 3) for n in range(clients)]
        await asyncio.gather(*each, self.killer(kills, seconds / (kills + 1)))
        watch.cancel()
        await asyncio.sleep(2)
        metrics = {name: self.server.metric(f"dflash_num_requests_{name}") for name in ("running", "waiting")}
        ends = dict(self.ends.most_common())
        figures = {"requests": self.ends.total(), "ends": ends, "left_behind": metrics}
        return figures | {"memory": self.memory.samples}

    async def client(self, *, http: bool) -> None:
        """One client, which sends requests one after the other."""
        async with aio.InferenceServerClient(self.server.grpc) as connection:
            while time.monotonic() < self.end:
                try:
                    async with asyncio.timeout(HANGING_SECONDS):
                        self.ends[await (self.over_http() if http else self.over_grpc(connection))] += 1
                except TimeoutError:
                    self.faults.append("a request hung")
                await asyncio.sleep(self.rng.uniform(0, 0.1))

    def request(self) -> tuple[dict[str, Any], int]:
        """A request's fields, and the number of its prompt; -1 for a wrong request, PROMPTS for a new prompt."""
        if self.rng.random() < 0.15:
            return dict(self.rng.choice(WRONG)), -1
        which = self.rng.randrange(PROMPTS)
        if self.rng.random() < 0.2:  # a prompt that no other request has
            return {"text_input": f"{self.rng.random()} {self.prompts[which]}", "max_tokens": 8}, PROMPTS
        params, most = self.params[which], self.rng.randint(1, LONGEST)
        fields: dict[str, Any] = {"text_input": self.prompts[which], "max_tokens": most, "ignore_eos": True}
        fields |= {"temperature": params.temperature, "seed": which, "stream": self.rng.random() < 0.6}
        return fields | {"speculate": self.rng.random() < 0.8}, which

    def check(self, which: int, got: list[int], fields: dict[str, Any], reason: str) -> str:
        """Compare tokens with the known answer, if there is one. Returns the reason of its end."""
        if which == PROMPTS:
            return reason
        if which < 0:
            if reason != "cut off":
                self.faults.append(f"a wrong request was taken: {fields}"[:200])
            return reason
        expected = self.expected[which][: fields["max_tokens"]]
        if got != (expected if reason == "length" else expected[: len(got)]):
            self.faults.append(f"wrong tokens for prompt {which}, {reason}")
        return reason

    async def over_grpc(self, connection: Any) -> str:
        """The outcome of a random request."""
        fields, which = self.request()
        leave = self.rng.choice((None, None, None, 0, 2)) if which >= 0 else None
        # A wrong request has none: if it passed before the prompt is read, that would be its answer.
        timeout = self.rng.choice((None, None, 1, 20_000, 200_000)) if which >= 0 else None
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
        return self.check(which, got, fields, reason)

    async def over_http(self) -> str:
        """The outcome of a random request."""
        fields, which = self.request()
        if any(isinstance(value, bytes) for value in fields.values()):
            fields = {"text_input": "a", "top_p": 7.0}
        fields["stream"] = False
        try:
            _, answer = await asyncio.to_thread(self.server.generate, **fields)
        except ValueError:  # no answer
            return "cut off"
        if "error" in answer:
            return refusal(answer["error"], which)
        ids = answer["output_ids"]
        return self.check(which, ids if isinstance(ids, list) else [ids], fields, answer["finish_reason"])

    async def killer(self, times: int, pause: float) -> None:
        """Kill the engine so many times."""
        for _ in range(times):
            await asyncio.sleep(pause)
            for pid in self.server.processes(PROCESSES["engine"]):
                kill(pid)

    def sizes(self) -> dict[str, float]:
        """Resident memory of the processes, in MB."""
        sizes = {name: map(resident_of, self.server.processes(mark)) for name, mark in PROCESSES.items()}
        return {name: round(max(each, default=0.0), 1) for name, each in sizes.items()}


def refusal(message: str, which: int) -> str:
    """Why a request was refused."""
    if "in flight, which is the limit" in message:
        return "refused: queue is full"
    if which < 0:
        return "refused: wrong"
    down = re.search("engine process|no available|not healthy", message)
    return "refused: no engine" if down else f"? {message[:60]}"


if __name__ == "__main__":
    raise SystemExit(main())
