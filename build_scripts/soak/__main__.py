"""Minutes of mixed load on the engine or a server: its answers, and its memory.

    python -m build_scripts.soak BUNDLE [--by python|openai|triton] [--seconds 1200] [--clients 24] [--kills 0]

`python` is AsyncLLM in this process. `openai` needs the extra `serve` and the openai client, `triton` the environment
of the server tests (make .venv-server/installed). Clients send random requests one after the other: streams and whole
answers, greedy and sampled, with and without drafts, deadlines, cancellations, prompts that no other request has, and
wrong requests. `--kills` kills a server's engine process so often, at equal distances.

Every request must be answered or refused within three minutes, as the machine may be busy. A complete answer must be
that of the target alone, and one that a deadline or its client ends must begin it. Without kills, the memory of all
processes must stay flat once the prefix cache is full. The last line is one JSON document. Exit code 1 with faults.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from build_scripts.harness import options, report, resident_of
from build_scripts.soak.ways import HANGING_SECONDS, WAYS, Asked, Refused, Way
from dflash_trt import LLM, SamplingParams

PROMPTS, LONGEST = 48, 48
PIECES = (
    "def add(a, b):", "\n    return", "the", "sum of", "17 and 25", ", please.", "héllo", "{'x': [1, 2]}",
)  # fmt: skip
WRONG: list[dict[str, Any]] = [
    {"temperature": -3.0}, {"max_tokens": 0}, {"prompt": ""}, {"prompt": "a" * 100_000}, {"top_p": 7.0},
]  # fmt: skip
WRONG_FIELDS: dict[str, list[dict[str, Any]]] = {
    "openai": [{"unknown": 1}, {"prompt": [10**8]}, {"structured_outputs": {"regex": "("}}, {"model": "another"}],
    "triton": [{"prompt": b"\xff\xfe"}, {"input_ids": [1]}],
}  # fmt: skip
FULL, MOST_GROWTH = 0.95, 1.03  # share of the cache's limit; memory of the last third over that of the first


def known_answers(bundle: Path, seed: int) -> list[tuple[dict[str, Any], str]]:
    """Fields of requests, half of them greedy, and their answers, decoded by the target alone."""
    rng, fields = random.Random(seed), list[dict[str, Any]]()
    for number in range(PROMPTS):
        prompt = " ".join(rng.choices(PIECES, k=rng.randint(1, 20)))
        sampling = {"temperature": rng.choice((0.0, 1.0)), "seed": number, "ignore_eos": True}
        fields.append({"prompt": prompt, "max_tokens": rng.randint(1, LONGEST), **sampling})
    params = [SamplingParams(**{k: v for k, v in request.items() if k != "prompt"}) for request in fields]
    with LLM(bundle, threads=1) as llm:
        answers = llm.generate([request["prompt"] for request in fields], params, speculate=False)
    return [(request, answer.text) for request, answer in zip(fields, answers, strict=True)]


class Load:
    """The clients, and what became of their requests."""

    def __init__(self, way: Way, kind: str, known: list[tuple[dict[str, Any], str]], seed: int) -> None:
        self.way, self.known, self.rng = way, known, random.Random(seed + 1)
        self.wrong = WRONG + WRONG_FIELDS.get(kind, [])
        self.ends, self.faults, self.samples = Counter[str](), list[str](), list[dict[str, float]]()

    async def run(self, seconds: float, clients: int, kills: int) -> None:
        """Send requests for so long."""
        end = monotonic() + seconds
        watch = asyncio.create_task(self._watch(max(seconds / 60, 1)))
        await asyncio.gather(
            *(self._client(end) for _ in range(clients)), self._kill(kills, seconds / (kills + 1))
        )
        watch.cancel()
        for _ in range(300):  # the cancellations of those who left
            left = [value(self.way.metrics(), f"num_requests_{name}") for name in ("running", "waiting")]
            if not any(left):
                return
            await asyncio.sleep(0.1)
        self.faults.append(f"left behind: {left}")

    def request(self) -> Asked:
        """A random one."""
        rng, (fields, expected) = self.rng, self.rng.choice(self.known)
        fields = fields | {"speculate": rng.random() < 0.8, "stream": rng.random() < 0.6}
        kind = rng.random()
        if kind < 0.1:
            return Asked(fields | rng.choice(self.wrong), wrong=True)
        if kind < 0.3:
            return Asked(fields | {"prompt": f"{rng.random()} {fields['prompt']}"})
        if kind < 0.5:
            return Asked(fields | {"stream": True}, expected, timeout=rng.choice((0.001, 0.05, 0.5)))
        if kind < 0.65:
            return Asked(fields | {"stream": True}, expected, leave=rng.randint(0, 4))
        return Asked(fields, expected)

    async def _client(self, end: float) -> None:
        while monotonic() < end:
            asked = self.request()
            try:
                async with asyncio.timeout(HANGING_SECONDS):
                    outcome = await self._outcome(asked)
            except TimeoutError:
                outcome = "HUNG"
            self.ends[outcome] += 1
            if outcome[:3].isupper():
                self.faults.append(f"{outcome}: {asked}"[:300])

    async def _outcome(self, asked: Asked) -> str:
        """How a request ended, in capitals if it is a fault."""
        text, reason, pieces = "", None, 0
        try:
            async with aclosing(self.way.stream(asked)) as stream:
                async for piece, reason in stream:
                    text += piece
                    if asked.leave is not None and reason is None and (pieces := pieces + 1) > asked.leave:
                        reason = "left"
                        break
        except Refused as refused:
            await asyncio.sleep(self.rng.uniform(0, 0.5))
            expected = "wrong" if asked.wrong else "deadline" if asked.timeout else ""
            why = str(refused)
            return f"UNEXPECTED {why}" if why in ("wrong", "deadline") and why != expected else why
        if asked.wrong:
            return "ACCEPTED"
        whole = reason in ("length", "stop")
        if not whole and reason not in ("left", "timeout"):
            return f"END {reason}"
        if asked.expected is not None and not (
            text == asked.expected if whole else asked.expected.startswith(text)
        ):
            return f"OTHER TEXT {text!r}"
        return str(reason)

    async def _kill(self, times: int, pause: float) -> None:
        for _ in range(times):
            await asyncio.sleep(pause)
            for pid in self.way.processes()["engine"]:
                os.kill(pid, signal.SIGKILL)

    async def _watch(self, interval: float) -> None:
        """Samples of resident memory in MB, and of the share of the prefix cache that is used."""
        while True:
            text = await asyncio.to_thread(self.way.metrics)
            kept, limit = value(text, "prefix_cache_bytes"), value(text, "prefix_cache_limit_bytes")
            sizes = {
                name: round(max(map(resident_of, pids), default=0.0), 1)
                for name, pids in self.way.processes().items()
            }
            self.samples.append({**sizes, "cache": round(kept / limit, 3) if limit else 0.0})
            print(self.samples[-1], flush=True)
            await asyncio.sleep(interval)

    def grown(self) -> list[str]:
        """The processes that have grown since the cache was full, and a cache that was not full long enough."""
        full = [sample for sample in self.samples if sample["cache"] >= FULL]
        third = len(full) // 3
        if third < 3:
            return [f"the prefix cache was full in {len(full)} samples only: let it run longer"]
        faults = []
        for name in full[0].keys() - {"cache"}:
            first, last = (median(s[name] for s in part) for part in (full[:third], full[-third:]))
            if last > MOST_GROWTH * first:
                faults.append(f"the memory of {name} grew from {first:.1f} to {last:.1f} MB")
        return faults


def value(metrics: str, name: str) -> float:
    """A sample of this name; 0 without one."""
    found = re.search(rf"^dflash_{name}(?:\{{.*\}})? (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


def main() -> int:
    """Run the clients."""
    parser = options(__doc__, seconds=1200.0, clients=24, kills=0)
    parser.add_argument("--by", choices=WAYS, default="python")
    args = parser.parse_args()
    if args.kills and args.by == "python":
        parser.error("--kills: AsyncLLM's engine is this process; use --by openai or triton")
    known = known_answers(args.bundle, args.seed)

    async def soak() -> Load:
        async with WAYS[args.by](args.bundle) as way:
            load = Load(way, args.by, known, args.seed)
            await load.run(args.seconds, args.clients, args.kills)
            return load

    load = asyncio.run(soak())
    figures = {"requests": load.ends.total(), "ends": dict(load.ends.most_common()), "memory": load.samples}
    return report(figures, load.faults + ([] if args.kills else load.grown()))


if __name__ == "__main__":
    raise SystemExit(main())
