"""The adaptive block length on engines with passes of 45 or 300 ms, compared with every fixed length.

    python -m build_scripts.bench.lengths [--milliseconds 45] [--rounds 300] [--useless]

The engines are those of tests/doubles/fake_engines.py with added sleeps. Clock and scheduler are real. A pass takes
1 + 0.1 (rows - 1) times the given time, and the first pass of each size five times as much. Fixed lengths are warm when
they begin. The adaptive length is warm only for the sizes that start-up measures. With `--useless` no draft is correct.
The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np

from dflash_trt.decoding.length.policy import FixedLength, Lengths
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.runtime import new_adaptive
from tests.doubles.fake_engines import BLOCK, VOCAB, Pool, request

DRAFTER = 0.3  # time of a drafter's pass, relative to the target's
COLD = 5  # time of the first pass of a size, relative to later ones
TURN = 15  # rounds per turn: the methods take turns, so that a busy moment affects all of them


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--milliseconds", type=float, default=45)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--useless", action="store_true")
    args = parser.parse_args()
    seconds = args.milliseconds / 1e3
    players = {str(n): Player(slow_pool(seconds, args.useless), FixedLength(n)) for n in (1, 2, 4, BLOCK)}
    for player in players.values():
        player.play(2)
        player.tokens, player.seconds = 0, 0.0
    pool = slow_pool(seconds, args.useless)
    begin = perf_counter()
    players["adaptive"] = Player(pool, new_adaptive(BLOCK, pool.pair, 1))
    start_up = perf_counter() - begin
    for _ in range(args.rounds // TURN):
        for name, player in players.items():
            player.play(TURN if name == "adaptive" else TURN // 3)
    speeds = {name: player.tokens / player.seconds for name, player in players.items()}
    for name, speed in speeds.items():
        print(f"{name:<10}{speed:8.2f} tokens/s{speed / speeds['1']:8.3f} of plain")
    fixed = max(speed for name, speed in speeds.items() if name != "adaptive")
    print(f"start-up {start_up:.1f} s; adaptive is {speeds['adaptive'] / fixed:.3f} of the best fixed length")
    print(
        json.dumps({"milliseconds": args.milliseconds, "useless": args.useless, "tokens_per_second": speeds})
    )


def slow_pool(seconds: float, useless: bool) -> Pool:
    pool = Pool(1, 2, max_seq_len=400)
    slow(pool.target, seconds, "tokens")
    slow(pool.drafter, DRAFTER * seconds, "block")
    if useless:
        draft = pool.drafter.run

        def wrong(feeds: Any, *, first_slot: int = 0) -> dict[str, np.ndarray]:
            out = draft(feeds, first_slot=first_slot)
            return {**out, "draft_tokens": (out["draft_tokens"] + 1) % VOCAB}

        pool.drafter.run = wrong
    return pool


def slow(engine: Any, seconds: float, rows: str) -> None:
    inner, warm = engine.run, set[tuple[int, ...]]()

    def run(feeds: Any, *, first_slot: int = 0) -> Any:
        size = feeds[rows].shape
        sleep(seconds * (1 + 0.1 * (size[1] - 1)) * (1 if size in warm else COLD))
        warm.add(size)
        return inner(feeds, first_slot=first_slot)

    engine.run = run


@dataclass
class Player:
    """One method: its requests one after the other, and the times of its decoding rounds. Prefill is left out."""

    pool: Pool
    lengths: Lengths
    tokens: int = 0
    seconds: float = 0.0
    requests: int = 0

    def play(self, rounds: int) -> None:
        scheduler = self.pool.scheduler
        while rounds:
            if scheduler.idle:
                self.requests += 1
                scheduler.submit(request([self.requests % 9, 2, 3], SamplingParams(max_tokens=200)))
                scheduler.step(self.lengths)  # prefill
            begin = perf_counter()
            emissions = scheduler.step(self.lengths)
            self.seconds += perf_counter() - begin
            self.tokens += sum(len(emission.token_ids) for emission in emissions)
            rounds -= 1


if __name__ == "__main__":
    main()
