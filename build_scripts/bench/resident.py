"""The memory that a pair adds to a process on the CPU, against what `plan` says (docs/planning.md).

    python -m build_scripts.bench.resident [--pairs smollm2-135m tiny] [--engines onnxruntime torch]

Each row is a process of its own: it opens the pair, and twice decodes prompts that fill the caches and look up the
whole embedding. Measured is what VmRSS grows by, from the import of this package and the engine's library on.
The last line is one JSON document.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from build_scripts import harness
from dflash_trt import LLM, SamplingParams, hardware
from dflash_trt.building.build import build
from dflash_trt.checkpoint.catalogue import known_configs
from dflash_trt.cli import make_parser
from dflash_trt.cli.plan import prepare
from dflash_trt.formats.precision import parse_precision
from dflash_trt.models.configs import read_target_config
from dflash_trt.planning.gpus import Gpu
from dflash_trt.planning.memory import estimate_memory

# Precision, tokens, sequences.
ROWS: dict[str, list[tuple[str | None, int, int]]] = {
    "onnxruntime": [(None, 1024, 1), (None, 1024, 4), (None, 2048, 1), ("target=fp32", 1024, 2),
                    ("target=int8", 1024, 2), ("target=fp8", 1024, 1)],
    "torch": [("target=fp32,drafter=fp32", 1024, 1), ("target=fp32,drafter=fp32", 1024, 4)],
}  # fmt: skip


def main() -> int:
    """Print a row for each setting."""
    parser = harness.parser(__doc__)
    parser.add_argument("--pairs", nargs="+", default=["tiny", "tiny-gpt-oss", "smollm2-135m"])
    parser.add_argument("--engines", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--inside", nargs=3, help="of a process that is measured: bundle, sequences, library")
    args = parser.parse_args()
    if args.inside:
        return _inside(args.inside[0], int(args.inside[1]), args.inside[2])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for engine in args.engines:
            for pair in args.pairs:
                for precision, length, batch in ROWS[engine]:
                    rows.append(_row(Path(folder) / "bundle", engine, pair, precision, length, batch))
                    print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"processor": hardware.processor(), "rows": rows}))
    return 0


def _row(
    place: Path, engine: str, pair: str, precision: str | None, length: int, batch: int
) -> dict[str, Any]:
    chosen = parse_precision(precision)
    length = min(length, read_target_config(known_configs(pair)[0]).max_position_embeddings)
    out = place.with_name(f"{pair}-{engine}-{precision}-{length}")
    if not out.exists():
        build(pair, None, out, engine=engine, max_seq_len=length, precision=chosen, weights="link")
    command = [sys.executable, "-m", "build_scripts.bench.resident", "--inside", str(out), str(batch), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    planned = _planned(engine, pair, precision, length, batch)
    return {
        "engine": engine, "pair": pair, "precision": precision, "tokens": length, "sequences": batch,
        "planned": planned, "measured": measured, "ratio": round(planned / measured, 3),
    }  # fmt: skip


def _planned(engine: str, pair: str, precision: str | None, length: int, batch: int) -> float:
    words = [
        "plan",
        "--target",
        pair,
        "--engine",
        engine,
        "--max-seq-len",
        str(length),
        "--max-batch-size",
        str(batch),
    ]
    args = make_parser().parse_args([*words, *(["--precision", precision] if precision else [])])
    here = Gpu("here", "here", sm=0, memory_bytes=hardware.memory_bytes() or 0, gpus_per_node=1, sources={})
    return round(estimate_memory(*prepare(args, here)).total_bytes / 1e6, 1)


def _inside(bundle: str, batch: int, library: str) -> int:
    importlib.import_module(library)
    before = _resident()
    with LLM(bundle, max_batch_size=batch, prefix_cache_bytes=0, threads=1) as llm:
        tokens = 16
        length = llm.max_seq_len - tokens
        vocab, block = (llm.bundle.manifest[name] for name in ("vocab_size", "block_size"))
        drafting: Any = {"block_length": block, "draft_source": "drafter"}
        prompts = [[(i * vocab // length + j) % vocab for i in range(length)] for j in range(batch)]
        for _ in range(2):
            llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True), **drafting)
        print(round((_resident() - before) / 1e6, 1))
    return 0


def _resident() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    sys.exit(main())
