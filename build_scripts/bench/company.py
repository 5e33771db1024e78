"""How long a GPU waits for the host in a round of many requests, and how full its slots are while others wait, on a CPU
and with passes that take a given time.

    python -m build_scripts.bench.company [--requests 1,8,32,128] [--pass-ms 6] [--tokens 60] [--delays 0,50,200]
        [--window ROWS]

The arrays are those of a GPU, over the tests' engines, whose drafts are right in four of five cases. What they compute
takes no time here. A pass of the target takes --pass-ms for every 256 rows, at least once, and one of the drafter a
tenth of it, once the pass before has ended and the host has started it. All else takes the CPU time of the host's
thread. Each number of requests runs twice: with rounds that wait for the results of the ones before, and with rounds
that start before those where they can. The first table has the milliseconds of a round in which no pass runs, tokens
per second, and the share of the rounds that started before. With --window, half of the target's caches have a window,
as those of gpt-oss do (128), whose rows move down by 256.

For the second table, four times as many requests as slots come at once, with prompts of 20 to 1,200 tokens and answers
of up to twice --tokens. For each of --delays (milliseconds; 0: a chunk in a step, a prompt in a pass) it has the share
of the slots that rounds use while requests wait, tokens per second, and the milliseconds between two parts of an
answer. The last line is one JSON document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import prod
from random import Random
from time import thread_time
from typing import Any

import numpy as np

from build_scripts import harness
from dflash_trt.cli.options import at_least, list_of
from dflash_trt.decoding import scheduler as scheduler_module
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.engines.device.stream import Landing
from dflash_trt.hardware import processor
from tests.doubles.device_pool import DevicePool
from tests.doubles.fake_engines import BLOCK, FakeTarget
from tests.doubles.fake_states_and_windows import WindowTarget
from tests.doubles.pool import request
from tests.doubles.schedules import prompt

_FILL = Landing.fill
_ROWS = 256  # of a pass that takes as long as one of a single row


class Times:
    """The time of the host, less that of work which a GPU does, and the time at which the GPU's passes end."""

    def __init__(self) -> None:
        self.skipped = self.end = self.idle = 0.0

    def now(self) -> float:
        return thread_time() + self.skipped

    def wait(self, until: float) -> None:
        self.skipped += max(until - self.now(), 0.0)

    def of_gpu(self, work: Callable[..., Any], seconds: float = 0.0) -> Callable[..., Any]:
        """seconds: of a pass of few rows."""

        def timed(*given: Any, **named: Any) -> Any:
            begin = thread_time()
            done = work(*given, **named)
            self.skipped -= thread_time() - begin
            if seconds:
                feeds = given[1]
                rows = prod(feeds["tokens" if "tokens" in feeds else "features"].shape[:2])
                begin = max(self.now(), self.end)
                self.idle += begin - self.end
                self.end = begin + seconds * max(rows / _ROWS, 1.0)
            return done

        return timed


def _timed(pool: DevicePool, args: Any) -> Times:
    """Let the passes of a pool take their times."""
    arrays, times, landed = pool.pair.arrays, Times(), dict[Landing, float]()
    engines: Any = (pool.pair.target, 1.0), (pool.pair.drafter.runner, 0.1)
    for engine, share in engines:
        engine.run = times.of_gpu(engine.run, share * args.pass_ms / 1e3)
    arrays.run = arrays._round.run = times.of_gpu(arrays.run)
    readable = arrays.readable

    def read(*given: Any) -> Any:
        times.wait(times.end)
        return readable(*given)

    arrays.readable = read

    def filled(self: Landing, numbers: Any) -> None:
        _FILL(self, numbers)
        landed[self] = times.end

    def waited(self: Landing) -> None:
        times.wait(landed[self])

    Landing.fill, Landing.wait = filled, waited  # type: ignore[method-assign]
    scheduler_module.perf_counter = times.now  # type: ignore[attr-defined]
    return times


def measure(count: int, args: Any, *, ahead: bool) -> list[float]:
    """Milliseconds of a round without a pass, tokens per second, and the percent of the rounds that started ahead, of
    requests that have read their prompts.
    """
    windowed = {"window": args.window, "stride": 256, "most": 512}
    target = type("Windowed", (WindowTarget,), windowed) if args.window else FakeTarget
    longest, lengths = (
        4 + (args.window or 0) * 3,
        FixedLength(BLOCK),
    )  # prompts, which end at any place of a stride
    pool = DevicePool(count, max_seq_len=args.tokens + longest + 100, chunk=longest, target=target)
    times, arrays = _timed(pool, args), pool.pair.arrays
    if not ahead:
        arrays.possible = lambda *given: False
    scheduler, tokens = pool.scheduler, 0
    for i in range(count):
        length = 4 + 37 * i % (longest - 3)
        scheduler.submit(request(prompt(length, i), SamplingParams(max_tokens=args.tokens)))
    while scheduler.filling or scheduler.waiting:
        scheduler.step(lengths)
    begin = times.now()
    times.end = max(times.end, begin)  # of a round that runs
    times.idle, rounds, pool.followed = 0.0, sum(scheduler.metrics._block_lengths), 0
    while not scheduler.idle:
        tokens += sum(len(emission.token_ids) for emission in scheduler.step(lengths))
    rounds = sum(scheduler.metrics._block_lengths) - rounds
    return [1e3 * times.idle / rounds, tokens / (times.now() - begin), 100 * pool.followed / rounds]


def admission(slots: int, args: Any, delay: float) -> list[float]:
    """Percent of the slots in rounds while requests wait, tokens per second, and the median, the 99th percentile and
    the longest of the milliseconds between two parts of an answer.
    """
    pool, random = DevicePool(slots, chunk=512, max_seq_len=1200 + 2 * args.tokens), Random(0)
    times, scheduler = _timed(pool, args), pool.scheduler
    scheduler.prompt_delay = delay / 1e3
    pool.pair.most_together = 1 if not delay else 16
    for i in range(4 * slots):
        length = random.choice((20, 40, 60, 100, 200, 400, 1200))
        params = SamplingParams(max_tokens=random.randint(args.tokens // 4, 2 * args.tokens))
        scheduler.submit(request(prompt(length, i), params))
    begin, tokens, used, latest, gaps = times.now(), 0, list[int](), dict[Any, float](), list[float]()
    while not scheduler.idle:
        for part in scheduler.parts(FixedLength(BLOCK)):
            for emission in part:
                tokens += len(emission.token_ids)
                if emission.request in latest:
                    gaps.append(1e3 * (times.now() - latest[emission.request]))
                latest[emission.request] = times.now()
        if scheduler.waiting and len(latest) > slots:  # the first ones have come
            used.append(len(scheduler.active))
    share = 100 * sum(used) / max(len(used), 1) / slots
    return [share, tokens / (times.now() - begin), *np.percentile(gaps, [50, 99, 100])]


def main() -> int:
    """Measure, and print a table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--requests", type=list_of(at_least(1)), default=[1, 8, 32, 128])
    parser.add_argument("--pass-ms", type=float, default=6.0, metavar="MS")
    parser.add_argument("--tokens", type=at_least(1), default=60, help="of each answer")
    parser.add_argument("--window", type=at_least(2), metavar="ROWS")
    parser.add_argument("--delays", type=list_of(at_least(0)), default=[0, 50, 200], metavar="MS")
    args = parser.parse_args()
    rows, filled = list[Any](), list[Any]()
    for count in args.requests:
        both = measure(count, args, ahead=False)[:2] + measure(count, args, ahead=True)
        rows.append([count, *(round(x, 3) for x in both)])
        for delay in args.delays:
            filled.append([count, delay, *(round(x, 1) for x in admission(count, args, delay))])
    print(
        harness.markdown(["requests", "waiting: ms", "tokens/s", "ahead: ms", "tokens/s", "ahead: %"], rows)
    )
    gaps = [f"gap: {which}" for which in ("50%", "99%", "most")]
    print(harness.markdown(["slots", "delay: ms", "in use: %", "tokens/s", *gaps], filled))
    print(json.dumps({"processor": processor(), "pass_ms": args.pass_ms, "rows": rows, "filled": filled}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
