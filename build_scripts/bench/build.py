"""Time and peak memory of `dflash-trt build` on a generated Qwen3-shaped BF16 pair.

    python -m build_scripts.bench.build [--gigabytes 1.2] [--dir DIR] [--genai]

With --genai, onnxruntime-genai's model builder converts the same target to float32 for the CPU in the same run. It
needs onnxruntime-genai, torch and transformers. Its work is not the same: it writes new weights, and its graph has no
taps. Peak memory is the VmHWM of the process. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from build_scripts.bench.generated import write_pair

_SECONDS = 0.02  # between two samples of a process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.2, help="approximate size of the pair's weights")
    parser.add_argument("--dir", type=Path, help="working directory (default: a temporary directory)")
    parser.add_argument("--genai", action="store_true", help="also run onnxruntime-genai's model builder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        work = Path(folder)
        hidden, intermediate, vocab = 1024, 4096, 65536
        per_layer = 2 * (3 * hidden * hidden + 3 * hidden * intermediate)  # q, k, v, o (grouped) and the MLP
        layers = max(8, round((args.gigabytes * 1e9 - 4 * hidden * vocab) / per_layer) - 5)
        size = write_pair(work, hidden=hidden, layers=layers, intermediate=intermediate, vocab=vocab)
        largest = 2 * hidden * vocab
        limit = 1.2 * largest + 400e6
        print(f"weights {size / 1e9:.2f} GB, {layers} layers, largest tensor {largest / 1e6:.0f} MB")
        command = [sys.executable, "-m", "dflash_trt", "build", "--target", str(work / "target")]
        command += ["--drafter", str(work / "drafter")]
        result: dict[str, Any] = {
            "weight_bytes": size,
            "largest_tensor_bytes": largest,
            "bound_bytes": round(limit),
            "cores": len(os.sched_getaffinity(0)),
        }
        peak = 0
        for weights in ("link", "copy"):
            out = work / weights
            seconds, used = measure([*command, "--weights", weights, "--out", str(out)])
            peak = max(peak, used)
            written = sum(f.stat().st_size for f in out.rglob("*") if f.is_file() and f.stat().st_nlink == 1)
            print(
                f"dflash-trt build --weights {weights}: {seconds:.2f} s, peak RSS {used / 1e6:.0f} MB "
                f"(bound: {limit / 1e6:.0f} MB), {written / 1e6:.2f} MB written"
            )
            result[weights] = {"seconds": round(seconds, 3), "peak_rss_bytes": used, "written_bytes": written}
        if args.genai:
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(work / "target")]
            command += ["-o", str(work / "genai"), "-p", "fp32", "-e", "cpu", "-c", str(work / "cache")]
            other, other_peak = measure(command)
            other_written = sum(f.stat().st_size for f in (work / "genai").rglob("*") if f.is_file())
            print(f"onnxruntime-genai builder: {other:.2f} s, peak RSS {other_peak / 1e6:.0f} MB")
            print(f"  {other_written / 1e6:.0f} MB written")
            result["genai"] = {
                "version": version("onnxruntime-genai"),
                "seconds": round(other, 3),
                "peak_rss_bytes": other_peak,
                "written_bytes": other_written,
            }
    print(json.dumps(result))
    sys.exit(peak > limit)


def measure(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of one process. ru_maxrss would include this process's own memory."""
    begin, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None:
            found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text(), re.M)
            peak = max(peak, int(found[1]) << 10 if found else 0)  # a finished process has none
            time.sleep(_SECONDS)
        seconds = time.perf_counter() - begin
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read().decode()[-2000:]}")
    return seconds, peak


if __name__ == "__main__":
    main()
