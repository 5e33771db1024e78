"""Time and memory of layers that keep a window's rows, against the same graph with caches of all rows.

    python -m build_scripts.bench.windows [--lengths 3900 16000] [--rows 1 8] [--rounds 60]

The pair is tiny-gpt-oss, half of whose layers see 64 tokens. Its copy here allows longer sequences than it was trained
for, which changes the text but neither times nor memory. Only the target runs, on ONNX Runtime, over random tokens.

time    median milliseconds of CPU time of a pass of `--rows` rows after so many tokens, on one thread. Both caches take
        turns
memory  how much resident memory a process gives back when it frees the caches of one sequence of so many tokens

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from build_scripts import harness
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine
from dflash_trt.hardware import processor

SHIPPED = Path(__file__).resolve().parents[2] / "dflash_trt" / "shipped" / "tiny-gpt-oss"
CHUNK, VOCAB = 512, 2000


def main() -> None:
    """Measure memory and time for each length."""
    parser = harness.parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[3900, 16000], help="tokens before a pass")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="rows of a pass")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--freed", nargs=3, metavar=("BUNDLE", "KIND", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.freed:
        print(freed(*args.freed))
        return
    lengths = []
    with tempfile.TemporaryDirectory() as folder:
        path = long_pair(Path(folder), max(args.lengths))
        for length in args.lengths:
            mib = {kind: in_own_process(path, kind, length) for kind in ("window", "all")}
            lengths.append({"tokens": length, "caches_mib": mib, "passes": timed(path, length, args)})
            print(json.dumps(lengths[-1], indent=2), flush=True)
    print(json.dumps({"processor": processor(), "lengths": lengths}))


def long_pair(folder: Path, longest: int) -> Path:
    """A bundle of the shipped pair for sequences of so many tokens."""
    for role in ("target", "drafter"):
        shutil.copytree(SHIPPED / role, folder / role)
        config = folder / role / "config.json"
        fields = json.loads(config.read_text()) | {"max_position_embeddings": longest + 1024}
        config.write_text(json.dumps(fields))
    sources = str(folder / "target"), str(folder / "drafter")
    return build(*sources, folder / "bundle", max_seq_len=longest + 512).path


def engine(path: Path, kind: str) -> OnnxRuntimeEngine:
    """The target with caches of the windows, or of all rows."""
    bundle = Bundle.open(path)
    kinds = bundle.cache_kinds("target") if kind == "window" else ()
    return OnnxRuntimeEngine(path / "target.onnx", slots=1, capacity=bundle.capacity, kinds=kinds, threads=1)


def feeds(start: int, rows: int) -> dict[str, Any]:
    """The inputs of a pass over random tokens."""
    tokens = np.random.default_rng(start).integers(4, VOCAB, (1, rows))
    return {"tokens": tokens, "start": np.array([start]), "rows": np.arange(rows)[None]}


def fill(target: OnnxRuntimeEngine, start: int, stop: int) -> None:
    """Give the caches the rows from `start` to `stop`."""
    for begin in range(start, stop, CHUNK):
        target.run(feeds(begin, min(CHUNK, stop - begin)) | {"rows": np.array([[0]])})


def timed(path: Path, length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of passes after `length` tokens."""
    engines = {kind: engine(path, kind) for kind in ("window", "all")}
    for target in engines.values():
        fill(target, 0, length)
    passes = []
    for rows in args.rows:
        given = feeds(length, rows)
        times: dict[str, list[float]] = {kind: [] for kind in engines}
        for i in range(args.rounds):
            for kind, target in list(engines.items())[:: 1 if i % 2 else -1]:
                target.run(given)  # the other engine's weights are in the processor's caches
                begin = time.thread_time()
                target.run(given)
                times[kind].append(1000 * (time.thread_time() - begin))
        ratio = statistics.median(a / b for a, b in zip(times["window"], times["all"], strict=True))
        ms = {kind: round(statistics.median(each), 3) for kind, each in times.items()}
        passes.append({"rows": rows, "ms": ms, "window_over_all": round(ratio, 3)})
    return passes


def in_own_process(path: Path, kind: str, length: int) -> float:
    """MiB that the caches of so many tokens take."""
    command = [sys.executable, "-m", "build_scripts.bench.windows", "--freed", str(path), kind, str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def freed(path: str, kind: str, length: str) -> float:
    """MiB that this process gives back with its caches."""
    target = engine(Path(path), kind)
    fill(target, 0, int(length))
    before = harness.resident_of(os.getpid())
    target.caches.close()
    return round((before - harness.resident_of(os.getpid())) * 1e6 / (1 << 20), 1)


if __name__ == "__main__":
    main()
