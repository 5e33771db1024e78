"""The adaptive block length on the simulated pairs of tests/doubles/simulation.py, as tables.

    python -m build_scripts.bench.adaptive_length [--rounds 3000] [--seed 0]   # each kind of start
    python -m build_scripts.bench.adaptive_length --loads [--seed 0]           # stalls, drifts and busy periods
    python -m build_scripts.bench.adaptive_length --constants [--rounds 1500]  # each constant halved and doubled
    python -m build_scripts.bench.adaptive_length --single [--rounds 500]      # only single requests timed
    python -m build_scripts.bench.adaptive_length --bundle DIR --records FILE  # the same, replaying a measured pair

Records are those of build_scripts.bench.predicted. Their medians are the costs of a replayed pair's passes, and their
tokens per round give the chance of each draft.

A speed is relative: the time of a fixed length for the same tokens, divided by the time taken.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from build_scripts.bench.predicted import made, merged, read_records, tokens_per_round
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.length.pass_times import PassTimes
from dflash_trt.planning.beliefs import Belief, beliefs
from dflash_trt.planning.steps import DRAFTER, TARGET, Grid
from tests.doubles.simulation import BEGINNINGS, BELIEFS, HARD, LOADS, World, world

CONSTANTS = {
    "adaptive": ("_SHARE", "_ADVANCE", "_DRAFTED", "_PLAIN", "_PRIOR"),
    "pass_times": ("_SHARED", "_LONG", "_IN_A_ROW", "_BELIEF", "_PASSES", "_ROUNDS"),
    "stalls": ("_SHARES", "_SIZE", "_RIDGE"),
}
# The kinds of start with which constants are varied.
TRIED = ("right", "each by its own factor", "all three times from the middle")
_REPLAYS = 5  # of each start, with other noise
Job = tuple[str, str, str, str, int, str, int]
Change = tuple[str, str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--single", action="store_true")
    parser.add_argument("--bundle", type=Path, help="of the pair to replay")
    parser.add_argument("--records", type=Path)
    args = parser.parse_args()
    if args.bundle is not None:
        of_measured(args.bundle, args.records, args.seed)
    elif args.single:
        of_beliefs(args.rounds, args.seed)
    elif args.constants:
        of_constants(args.rounds, args.seed)
    else:
        of_starts(args.rounds, args.seed, args.loads)


def of_starts(rounds: int, seed: int, loads: bool) -> None:
    """Each kind of start without load, or each load after a right start."""
    print("| world | mean to the best | least to the best | least to plain |\n|---|---|---|---|")
    for name in LOADS if loads else BEGINNINGS:
        kind = ("right", seed, name) if loads else (name, seed, "none")
        print(
            f"| {name} | {figures(simulate([(*names, *kind, rounds) for names in HARD], None))} |", flush=True
        )


def of_beliefs(rounds: int, seed: int) -> None:
    print("| believed | pair | to the best | to plain |\n|---|---|---|---|")
    for name, believed in BELIEFS.items():
        for names in HARD:
            simulated = replace(world(*names, seed=seed), batch=4, single=True, believed=believed)
            ratios = simulated.compare(simulated.run(simulated.controller(), rounds))
            print(f"| {name} | {', '.join(names)} | {ratios.min():.3f} | {ratios[0]:.3f} |", flush=True)


def of_measured(bundle: Path, file: Path, seed: int) -> None:
    """The speed of the first rounds of a measured pair, by what is known at start-up."""
    records = [r for r in read_records(file) if r["steps"]["bundle"]["name"] == bundle.name]
    steps, acceptance = merged(records), tokens_per_round(made(records).values())
    context, block = steps.contexts[0], steps.block_size
    costs = {
        kind: partial(_cost, steps.grids[side], context)
        for kind, side in (("verify", TARGET), ("draft", DRAFTER))
    }
    means = [1.0, *(acceptance.length(k) for k in range(2, block + 1))]
    reached = np.minimum.accumulate(np.clip(np.diff(means), 0.01, 0.99))
    chances = np.clip(reached / np.append(1.0, reached[:-1]), 0.05, 0.95)
    known = beliefs(Bundle.open(bundle), context)
    sides = {"verify": TARGET, "draft": DRAFTER}

    def by_place(rng: np.random.Generator, _: int, batch: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        chance = np.tile(chances[:n], (batch, 1))
        return chance, np.log(chance).astype(np.float32)

    starts: dict[str, dict[str, Any]] = {
        "all": {},
        "single requests": {"single": True},
        "single requests, the rest believed": {
            "single": True,
            "believed": lambda kind, batch, length: known[sides[kind]](batch, length),
        },
    }
    for side, grid in ((TARGET, steps.grids[TARGET]), (DRAFTER, steps.grids[DRAFTER])):
        _print_errors(side, grid, context, known[side])
    print("| timed at start-up | requests | first 20 rounds | 100 | 300 |\n|---|---|---|---|---|")
    for batch in steps.grids[TARGET].axes[0][1:]:
        for name, start in starts.items():
            speeds = []
            for rounds in (20, 100, 300):
                tries = []
                for number in range(_REPLAYS):
                    simulated = World(
                        block,
                        costs["verify"],
                        costs["draft"],
                        by_place,
                        batch=batch,
                        noise=0.1,
                        seed=seed + number,
                        **start,
                    )
                    ratios = simulated.compare(simulated.run(simulated.controller(), rounds))
                    tries.append(float(ratios.min()))
                speeds.append(f"{np.mean(tries):.3f}")
            print(f"| {name} | {batch} | {' | '.join(speeds)} |", flush=True)


def _print_errors(side: str, grid: Grid, context: int, believed: Belief) -> None:
    """The errors of beliefs: of all passes, and of batches if single requests are timed."""
    batches, rows = grid.axes[0], grid.axes[1]
    single = {1: {n: grid(1, n, context) for n in rows}}
    times = PassTimes(single, batches, believed), PassTimes(single, batches)
    errors = np.array(
        [
            [
                abs(np.log(seconds / grid(b, n, context)))
                for seconds in (believed(b, n), *(t(b)[n - 1] for t in times))
            ]
            for b in batches[1:]
            for n in rows
        ]
    )
    model, scaled, none = np.expm1(np.median(errors, axis=0))
    print(
        f"{side}, {len(errors)} passes of several requests, median error: {model:.0%} by the model, {scaled:.0%} with "
        f"single requests timed, {none:.0%} with their times for all batches"
    )


def _cost(grid: Grid, context: int, batch: int, length: int) -> float:
    return grid(batch, max(length, grid.axes[1][0]), context)


def of_constants(rounds: int, seed: int) -> None:
    jobs: list[Job] = [(*names, beginning, seed, "none", rounds) for names in HARD for beginning in TRIED]
    print("| constant | mean to the best | least to the best | least to plain |\n|---|---|---|---|")
    print(f"| as they are | {figures(simulate(jobs, None))} |")
    for name, constants in CONSTANTS.items():
        for constant in constants:
            value = getattr(_module(name), constant)
            others = (type(value)(value / 2), value * 2)
            for other in others:
                speeds = simulate(jobs, (name, constant, other))
                print(f"| `{name}.{constant}` {value} → {other:g} | {figures(speeds)} |", flush=True)


def simulate(jobs: list[Job], change: Change | None) -> np.ndarray:
    """[jobs, 2]: speed relative to the best fixed length, and to plain decoding."""
    with Pool(initializer=_change, initargs=(change,)) as pool:
        return np.array(pool.map(_speeds, jobs))


def figures(speeds: np.ndarray) -> str:
    best, plain = speeds.T
    return f"{best.mean():.3f} | {best.min():.3f} | {plain.min():.3f}"


def _change(change: Change | None) -> None:
    if change:
        module, constant, value = change
        setattr(_module(module), constant, value)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"dflash_trt.decoding.length.{name}")


def _speeds(job: Job) -> tuple[float, float]:
    *names, rounds = job
    simulated = world(*names)
    ratios = simulated.compare(simulated.run(simulated.controller(), rounds))
    return float(ratios.min()), float(ratios[0])


if __name__ == "__main__":
    main()
