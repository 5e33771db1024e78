"""The memory that a pair adds to a process on the CPU, against what `plan` says (docs/planning.md).

    python -m build_scripts.bench.resident [--pairs smollm2-135m tiny] [--engines onnxruntime torch]

Each row is a process of its own: it opens the pair, and twice decodes prompts that fill the caches and look up the
whole embedding. Only the last request drafts, so that the prompts of the others wait for the drafter until then.
Measured is the peak of resident memory after the pair was opened, less what the process had after the import of this
package and the engine's library. `windows`, `hybrid` and `eagle3` are pairs of noise, whose target has windows, Gated
DeltaNet, or a drafter of that kind. The last line is one JSON document.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from build_scripts import harness
from dflash_trt import AsyncLLM, SamplingParams, hardware

# Precision, tokens, sequences.
ROWS: dict[str, list[tuple[str | None, int, int]]] = {
    "onnxruntime": [(None, 1024, 1), (None, 1024, 4), (None, 2048, 1), ("target=fp32", 1024, 2),
                    ("target=int8", 1024, 2), ("target=fp8", 1024, 1)],
    "torch": [("target=fp32,drafter=fp32", 1024, 1), ("target=fp32,drafter=fp32", 1024, 4)],
}  # fmt: skip
NOISE = ("windows", "hybrid", "eagle3")


def main() -> int:
    """Print a row for each setting."""
    parser = harness.parser(__doc__)
    parser.add_argument("--pairs", nargs="+", default=["tiny", "tiny-gpt-oss", "smollm2-135m", *NOISE])
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
    # Here and below, because a process that is measured imports none of these.
    from dflash_trt.building.build import build
    from dflash_trt.checkpoint.catalogue import known_configs
    from dflash_trt.formats.precision import parse_precision
    from dflash_trt.models.configs import read_target_config

    chosen, (target, drafter) = parse_precision(precision), _pair(place.parent, pair)
    length = min(
        length,
        read_target_config(Path(target) if drafter else known_configs(pair)[0]).max_position_embeddings,
    )
    out = place.with_name(f"{pair}-{engine}-{precision}-{length}")
    if not out.exists():
        build(target, drafter, out, engine=engine, max_seq_len=length, precision=chosen, weights="link")
    command = [sys.executable, "-m", "build_scripts.bench.resident", "--inside", str(out), str(batch), engine]
    # torch's passes free every result, and glibc keeps up to 20 MB of that, differently from run to run.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "131072"} if engine == "torch" else {}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | allocator)
    measured = json.loads(done.stdout.splitlines()[-1])
    megabytes = planned(engine, target, drafter, precision, length, batch)
    return {
        "engine": engine, "pair": pair, "precision": precision, "tokens": length, "sequences": batch,
        "planned": megabytes, "measured": measured, "ratio": round(megabytes / measured, 3),
    }  # fmt: skip


@cache
def _pair(folder: Path, name: str) -> tuple[str, str | None]:
    """Target and drafter of a known pair, or of one of noise, which is written to the folder."""
    if name not in NOISE:
        return name, None
    from tests.doubles.checkpoints import make_drafter, make_target
    from tests.doubles.hybrid_checkpoints import make_hybrid
    from tests.doubles.kind_checkpoints import make_eagle3

    place = folder / name
    shape: dict[str, Any] = {"hidden": 384, "layers": 8, "heads": 6, "head_dim": 64, "intermediate": 1536}
    if name == "hybrid":
        target = make_hybrid(place / "target", hidden_size=384, intermediate_size=1536, num_hidden_layers=8)
    else:
        target = make_target(place / "target", **shape, sliding_window=128 if name == "windows" else None)
    if name == "eagle3":
        return str(target), str(make_eagle3(place / "drafter", target, layout="layers.0"))
    return str(target), str(make_drafter(place / "drafter", target, head_dim=64, intermediate=1536))


def planned(
    engine: str, target: str, drafter: str | None, precision: str | None, length: int, batch: int
) -> float:
    """The megabytes that `plan` computes, for the GPU of this machine or its processor."""
    from dflash_trt.cli import make_parser
    from dflash_trt.cli.plan import prepare
    from dflash_trt.planning.gpus import Gpu, gpu_here
    from dflash_trt.planning.memory import estimate_memory

    options = {"target": target, "drafter": drafter, "engine": engine, "precision": precision}
    options |= {"max-seq-len": str(length), "max-batch-size": str(batch)}
    args = make_parser().parse_args(
        ["plan", *(f"--{name}={value}" for name, value in options.items() if value)]
    )
    memory = hardware.memory_bytes() or 0
    here = gpu_here() or Gpu("here", "here", sm=0, memory_bytes=memory, gpus_per_node=1, sources={})
    return round(estimate_memory(*prepare(args, here)).total_bytes / 1e6, 1)


def _inside(bundle: str, batch: int, library: str) -> int:
    importlib.import_module(library)
    before = _memory("VmRSS")
    asyncio.run(_decode(bundle, batch))
    print(round((_memory("VmHWM") - before) / 1e6, 1))
    return 0


async def _decode(bundle: str, batch: int) -> None:
    tokens = 8 * (batch + 1)  # the first request still runs when the last one drafts
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    async with AsyncLLM(bundle, max_batch_size=batch, prefix_cache_bytes=0, threads=1) as llm:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        length = llm.max_seq_len - tokens
        vocab, block = (llm.bundle.manifest[name] for name in ("vocab_size", "block_size"))
        prompts = [[(i * vocab // length + j) % vocab for i in range(length)] for j in range(batch)]
        for _ in range(2):
            lengths = [*[1] * (batch - 1), block]
            asked = zip(prompts, lengths, strict=True)
            await asyncio.gather(
                *(llm.generate(ids, params, block_length=n, draft_source="drafter") for ids, n in asked)
            )


def _memory(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


if __name__ == "__main__":
    sys.exit(main())
