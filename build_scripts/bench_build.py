"""Time and peak memory of `dflash-trt build` on a generated Qwen3-shaped BF16 pair.

    python build_scripts/bench_build.py [--gigabytes 1.2] [--dir DIR]

The last line is one JSON document. Peak memory is the build process's own ru_maxrss.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from generated import write_pair


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.2, help="weights of the pair, about")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        hidden, intermediate, vocab = 1024, 4096, 65536
        per_layer = 2 * (4 * hidden * hidden + 3 * hidden * intermediate)  # q, k, v, o (grouped) and the MLP
        layers = max(8, round((args.gigabytes * 1e9 - 4 * hidden * vocab) / per_layer) - 5)
        size = write_pair(work, hidden=hidden, layers=layers, intermediate=intermediate, vocab=vocab)
        largest = 2 * hidden * vocab
        command = [sys.executable, "-m", "dflash_trt", "build", "--target", str(work / "target")]
        command += ["--drafter", str(work / "drafter"), "--out", str(work / "bundle")]
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        linked = (work / "target/model.safetensors").samefile(
            work / "bundle/weights/target/model.safetensors"
        )
        written = sum(f.stat().st_size for f in (work / "bundle").rglob("*") if f.suffix != ".safetensors")
    limit = 1.2 * largest + 400e6
    print(f"weights {size / 1e9:.2f} GB, {layers} layers, largest tensor {largest / 1e6:.0f} MB")
    print(f"build {seconds:.2f} s, peak RSS {peak / 1e6:.0f} MB (bound: {limit / 1e6:.0f} MB)")
    print(f"weights {'hard-linked' if linked else 'copied'}, {written / 1e6:.2f} MB written beside them")
    result = {
        "weight_bytes": size,
        "largest_tensor_bytes": largest,
        "seconds": round(seconds, 3),
        "peak_rss_bytes": peak,
        "bound_bytes": round(limit),
        "hard_linked": linked,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(json.dumps(result))
    sys.exit(peak > limit)


if __name__ == "__main__":
    main()
