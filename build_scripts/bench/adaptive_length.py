"""The adaptive block length on the simulated pairs of tests/doubles/simulated_pairs.py, as tables.

    python -m build_scripts.bench.adaptive_length [--rounds 3000] [--seeds 0]  # each kind of start
    python -m build_scripts.bench.adaptive_length --loads [--seeds 0]          # stalls, drifts and busy periods
    python -m build_scripts.bench.adaptive_length --requests [--seeds 0]       # requests whose drafts differ
    python -m build_scripts.bench.adaptive_length --constants [--rounds 1500]  # each constant halved and doubled

A speed is relative: the time of a fixed length for the same tokens, divided by the time taken.
"""

from __future__ import annotations

import importlib
from itertools import product
from multiprocessing import Pool
from types import ModuleType

import numpy as np

from build_scripts import harness
from tests.doubles.simulated_pairs import BEGINNINGS, HARD, LOADS, prompts, world

CONSTANTS = {
    "adaptive": ("_SHARE", "_CREDIT", "_LEAST", "_REPEATS", "_MARGIN", "_INTERVAL", "_ROUNDS", "_LONGEST"),
    "times": ("LAST", "_FEW", "_CHANGE", "_ROW", "_DRAFTER"),
    "rates": ("_RUNNING", "_ALL", "_PRIOR", "_TELLS", "_MOST_OWN", "_MOST_ALL", "_SLOPE"),
}
# The kinds of start with which constants are varied.
TRIED = ("right", "each by its own factor", "all three times from the middle")
Job = tuple[str, str, str, str, int, str, int]
Change = tuple[str, str, float]


def main() -> None:
    """Print the table that the options ask for."""
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--constants", action="store_true")
    parser.add_argument("--loads", action="store_true")
    parser.add_argument("--requests", action="store_true")
    args = parser.parse_args()
    if args.constants:
        of_constants(args.rounds, args.seeds)
    elif args.requests:
        of_requests(args.seeds)
    else:
        of_starts(args.rounds, args.seeds, args.loads)


def of_starts(rounds: int, seeds: list[int], loads: bool) -> None:
    """Each kind of start without load, or each load after a right start."""
    print("| world | mean to the best | least to the best | least to plain |\n|---|---|---|---|")
    for name in LOADS if loads else BEGINNINGS:
        kinds = [("right", seed, name) if loads else (name, seed, "none") for seed in seeds]
        jobs: list[Job] = [(*names, *kind, rounds) for names in HARD for kind in kinds]
        print(f"| {name} | {figures(simulate(jobs, None))} |", flush=True)


def of_requests(seeds: list[int]) -> None:
    """40 requests of 128 tokens for each seed, three times in turn, by what the drafter says of its drafts, the cost of
    a row, and the drafts.
    """
    print("| drafter says | 4 rows cost | first drafts right | mean to plain | least request | below 0.97 |")
    print("|---|---|---|---|---|---|")
    for confidence, rows, mean in product((None, "the truth"), (0.17, 0.07), (-1.0, -0.3, 0.3)):
        speeds = np.concatenate([prompts(rows, mean, seed, confidence=confidence) for seed in seeds])
        mean_speed, below = 1 / np.mean(1 / speeds), (speeds < 0.97).mean()
        kind = f"{confidence or 'nothing'} | {1 + 3 * rows:.1f} | {1 / (1 + np.exp(-mean)):.0%}"
        print(f"| {kind} | {mean_speed:.3f} | {speeds.min():.3f} | {below:.1%} |")


def of_constants(rounds: int, seeds: list[int]) -> None:
    """Every constant halved and doubled, on the kinds of start of TRIED."""
    jobs: list[Job] = [
        (*names, beginning, seed, "none", rounds) for names in HARD for beginning in TRIED for seed in seeds
    ]
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
    """The cells of a table: means and least of speeds [jobs, 2]."""
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
