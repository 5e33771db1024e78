"""Plan size, time and peak memory of every TensorRT-RTX build in continuous integration, as a table.

    python -m build_scripts.bench.plan_matrix

Each build has its own process. Seconds and peak resident memory (VmHWM, with mapped files) are those of the process,
including Python and its packages. Needs the test environment (torch makes the small checkpoints) and no GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from build_scripts.bench.build import measure
from dflash_trt.hardware import processor
from dflash_trt.reports.inspection import inspect
from tests.doubles.tensorrt_matrix import CASES, make_pair


def main() -> None:
    rows = []
    print("| pair | precision | capability | target's plan | drafter's plan | time | peak memory |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            target, drafter = make_pair(case.pair, work)
            command = [sys.executable, "-m", "dflash_trt", "build", "--engine", "tensorrt-rtx"]
            command += ["--target", target, *(["--drafter", drafter] if drafter else [])]
            command += ["--compute-capability", str(case.capability), "--out", str(work / "bundle")]
            command += ["--max-batch-size", "2", "--prefill-chunk", "16", "--max-seq-len", "64"]
            if case.precision:
                command += ["--precision", case.precision]
            seconds, peak = measure(command)
            plans = inspect(work / "bundle")["plans"]
        sizes = [plans[f"sm{case.capability}/{role}"]["size"] for role in ("target", "drafter")]
        megabytes = [f"{n / 1e6:.1f} MB" for n in sizes]
        precision = case.precision or "bf16"
        print(
            f"| {case.pair} | {precision} | {case.capability} | {' | '.join(megabytes)} | {seconds:.1f} s | "
            f"{peak / 1e6:.0f} MB |",
            flush=True,
        )
        rows.append({**vars(case), "plans": sizes, "seconds": seconds, "peak_rss_bytes": peak})
    print(json.dumps({"processor": processor(), "builds": rows}))


if __name__ == "__main__":
    main()
