"""Time of a target's passes behind a long context, and the memory that they take.

    python -m build_scripts.bench.context BUNDLE [BUNDLE ...] [--contexts 200,1000,3900] [--rows 1,8] [--threads 2]

Each BUNDLE is one for ONNX Runtime and has a process of its own; the processes take turns, context by context. A bundle
may have been built by another checkout of this repository: BUNDLE@CHECKOUT runs it by that checkout's engine. One
sequence is prefilled in chunks of 512, then passes of some rows take turns. Times are in milliseconds, least and
median; memory is resident and peak, in MB, of the process. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

CHUNK = 512


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE[@CHECKOUT]")
    parser.add_argument("--contexts", default="200,1000,3900", help="rows in the caches")
    parser.add_argument("--rows", default="1,8", help="rows of a pass")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    contexts, rows = ([int(n) for n in text.split(",")] for text in (args.contexts, args.rows))
    if args.child:
        child(Path(args.bundles[0]), contexts, rows, args.rounds, args.threads)
        return 0
    options = [f"--{name}={getattr(args, name)}" for name in ("contexts", "rows", "rounds", "threads")]
    processes = {name: start(name, options) for name in args.bundles}
    found: list[dict[str, Any]] = []
    for context in [None, *contexts]:
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"{name}: its process ended with {process.wait()}")
            found.append({"bundle": name, "context": context, **json.loads(line)})
            show(found[-1])
    print(json.dumps({"threads": args.threads, "rounds": args.rounds, "found": found}))
    return 0


def start(name: str, options: list[str]) -> subprocess.Popen[str]:
    bundle, _, checkout = name.partition("@")
    command = [sys.executable, str(Path(__file__).resolve()), bundle, *options, "--child"]
    roots = [str(Path(root).resolve()) for root in (checkout or Path(__file__).parents[2],)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*roots, f"{roots[0]}/plugins"])},
    )


def show(found: dict[str, Any]) -> None:
    times = [f"{rows} rows {min(ms):.2f} {median(ms):.2f}" for rows, ms in found.get("passes", {}).items()]
    if "prefill" in found:
        times.insert(0, f"prefill of {found['prefilled']} {found['prefill']:.0f}")
    place = "loaded" if found["context"] is None else f"behind {found['context']}"
    print(f"{found['bundle']}, {place}: {'; '.join(times)}; memory {found['memory']}", flush=True)


def child(bundle: Path, contexts: list[int], rows: list[int], rounds: int, threads: int) -> None:
    """One line of JSON for each line read."""
    from dflash_trt.engines.onnxruntime import OnnxRuntimeEngine  # of the checkout on the path

    vocab = json.loads((bundle / "manifest.json").read_text())["vocab_size"]
    sys.stdin.readline()
    room = max(contexts) + max(rows) + CHUNK
    engine = OnnxRuntimeEngine(bundle / "target.onnx", slots=1, capacity=room, threads=threads)
    print(json.dumps({"memory": memory()}), flush=True)
    rng = np.random.default_rng(0)

    def run(start: int, count: int, asked: list[int]) -> float:
        tokens = rng.integers(vocab, size=(1, count))
        begin = perf_counter()
        engine.run({"tokens": tokens, "start": np.array([start]), "rows": np.array([asked])})
        return 1e3 * (perf_counter() - begin)

    at = 0
    for context in contexts:
        sys.stdin.readline()
        begin_at, prefill = at, 0.0
        while at < context:
            count = min(CHUNK, context - at)
            prefill += run(at, count, [count - 1])
            at += count
        passes: dict[int, list[float]] = {count: [] for count in rows}
        for turn in range(rounds + 2):
            for count, ms in passes.items():
                took = run(context, count, list(range(count)))
                if turn >= 2:  # the first passes of a shape are slower
                    ms.append(took)
        result = {"prefilled": context - begin_at, "prefill": prefill, "passes": passes, "memory": memory()}
        print(json.dumps(result), flush=True)


def memory() -> dict[str, int]:
    """MB of this process, resident: now, and at most so far."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return {
        name: int(lines[key].split()[0]) * 1024 // 10**6
        for name, key in (("now", "VmRSS"), ("peak", "VmHWM"))
    }


if __name__ == "__main__":
    raise SystemExit(main())
