"""How long a GPU waits for the host in a round of many requests, on a CPU and with passes that take a given time.

    python -m build_scripts.bench.company [--requests 1,8,32] [--pass-ms 6] [--tokens 60]

The arrays are those of a GPU, over the tests' engines, whose drafts are right in four of five cases. What they compute
takes no time here. A pass of the target takes --pass-ms, and one of the drafter a tenth of it, once the pass before has
ended and the host has started it. All else takes the CPU time of the host's thread. Each number of requests runs twice:
with rounds that wait for the results of the ones before, and with rounds that start before those where they can. The
table has the milliseconds of a round in which no pass runs, and tokens per second. The last line is one JSON document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import thread_time
from typing import Any

from build_scripts import harness
from dflash_trt.cli.options import at_least, each
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.engines.device.stream import Landing
from dflash_trt.hardware import processor
from tests.doubles.device_pool import DevicePool
from tests.doubles.fake_engines import BLOCK
from tests.doubles.pool import request
from tests.doubles.schedules import prompt

_FILL = Landing.fill


class Times:
    """The time of the host, less that of work which a GPU does, and the time at which the GPU's passes end."""

    def __init__(self) -> None:
        self.skipped = self.end = self.idle = 0.0

    def now(self) -> float:
        return thread_time() + self.skipped

    def wait(self, until: float) -> None:
        self.skipped += max(until - self.now(), 0.0)

    def of_gpu(self, work: Callable[..., Any], seconds: float = 0.0) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            begin = thread_time()
            done = work(*given, **named)
            self.skipped -= thread_time() - begin
            if seconds:
                begin = max(self.now(), self.end)
                self.idle, self.end = self.idle + begin - self.end, begin + seconds
            return done

        return timed


def measure(count: int, args: Any, *, ahead: bool) -> tuple[float, float]:
    """Milliseconds of a round without a pass, and tokens per second, of requests that have read their prompts."""
    pool, times, lengths = DevicePool(count, max_seq_len=args.tokens + 100), Times(), FixedLength(BLOCK)
    arrays: Any = pool.pair.arrays
    for engine, share in ((pool.pair.target, 1.0), (pool.pair.drafter.runner, 0.1)):
        engine.run = times.of_gpu(engine.run, share * args.pass_ms / 1e3)
    arrays.run = arrays._round.run = times.of_gpu(arrays.run)
    if not ahead:
        arrays.possible = lambda *given: False
    landed = dict[Landing, float]()

    def filled(self: Landing, given: Any) -> None:
        _FILL(self, given)
        landed[self] = times.end

    def waited(self: Landing) -> None:
        times.wait(landed[self])

    Landing.fill, Landing.wait = filled, waited  # type: ignore[method-assign]
    scheduler, tokens = pool.scheduler, 0
    for i in range(count):
        scheduler.submit(request(prompt(4, i), SamplingParams(max_tokens=args.tokens)))
    while scheduler.filling or scheduler.waiting:
        scheduler.step(lengths)
    begin = times.end = times.now()
    times.idle, rounds = 0.0, sum(scheduler.metrics._block_lengths)
    while not scheduler.idle:
        tokens += sum(len(emission.token_ids) for emission in scheduler.step(lengths))
    rounds = sum(scheduler.metrics._block_lengths) - rounds
    return 1e3 * times.idle / rounds, tokens / (times.now() - begin)


def main() -> int:
    """Measure, and print a table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--requests", type=each(at_least(1)), default=[1, 8, 32])
    parser.add_argument("--pass-ms", type=float, default=6.0, metavar="MS")
    parser.add_argument("--tokens", type=at_least(1), default=60, help="of each answer")
    args = parser.parse_args()
    rows = []
    for count in args.requests:
        both = (*measure(count, args, ahead=False), *measure(count, args, ahead=True))
        rows.append([count, *(round(x, 3) for x in both)])
    print(harness.markdown(["requests", "waiting: ms", "tokens/s", "ahead: ms", "tokens/s"], rows))
    print(json.dumps({"processor": processor(), "pass_ms": args.pass_ms, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
