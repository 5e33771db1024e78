"""The attention of a plan of TensorRT-RTX, read from the plan's own kernels.

    python -m build_scripts.bench.plan_kernels [PAIR ...] [--capability 89 120] [--max-seq-len 4096 32768]

Prints a Markdown table. Needs the test environment and no GPU. A plan of TensorRT-RTX holds its kernels as CUDA C++
text. "wide" pairs have the attention of a published target: its heads, head size and windows, in two layers of a small
random checkpoint.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.hardware import processor
from tests.doubles.tensorrt_matrix import WIDE, make_pair

_ENTRY = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?([A-Za-z0-9_]+)\(')
_COUNT = re.compile(r"< (\d+)(?: / \d+)?\) \{")


@dataclass(frozen=True)
class Attention:
    """The attention of one plan, both profiles together.

    kernels: fused attention kernels.
    group: how many query heads share a key and value head in them. 1 where keys and values were repeated before.
    skipping: kernels that skip tiles of hidden rows.
    copies: elements of each kernel that goes over a whole cache of the usual batch, by name.
    """

    kernels: int
    group: tuple[int, ...]
    skipping: int
    copies: dict[str, int]


def read_attention(plan: bytes, cache_elements: int) -> Attention:
    """The attention of a plan. `cache_elements`: of one key cache, at the batch that the plan is made for."""
    text = plan.decode("latin-1")
    entries = list(_ENTRY.finditer(text))
    copies: dict[str, int] = {}
    for match, following in zip(entries, [*entries[1:], None], strict=True):
        body = text[match.end() : following.start() if following else len(text)][:6000]
        counts = [int(n) for n in _COUNT.findall(body)]
        if counts and max(counts) >= cache_elements // 2:  # two of bfloat16 may be one element
            copies[match[1]] = max(counts)
    return Attention(
        kernels=sum(match[1].startswith("_gemm_mha") for match in entries),
        group=tuple(sorted({int(n) for n in re.findall(r"(\d+), // query heads per k/v head", text)})),
        skipping=len(re.findall(r"initialize\(DATA_TYPE[^;]*_tile_skip_map", text)),
        copies=copies,
    )


def distinct_kernels(plan: bytes) -> Counter[str]:
    """Kernels of a plan by their kind."""
    names = {match[1] for match in _ENTRY.finditer(plan.decode("latin-1"))}
    return Counter(re.sub(r"_0x[0-9a-f]+.*", "", name) for name in names)


def attention_of(bundle: Bundle, capability: int) -> dict[str, Attention]:
    """The attention of a bundle's plans, by role."""
    built, found = bundle.manifest["tensorrt"], {}
    for role, plan in built["plans"][str(capability)].items():
        heads, size = _cache_of(bundle.path / f"{role}.onnx")
        elements = max(1, built["max_batch_size"] // 2) * heads * bundle.capacity * size
        found[role] = read_attention((bundle.path / plan["plan"]).read_bytes(), elements)
    return found


def measured(name: str, capability: int, length: int, batch: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        options = TensorRTOptions(capabilities=(capability,), max_batch_size=batch, prefill_chunk=64)
        begin = time.perf_counter()
        target, drafter = make_pair(name, work)
        out = work / "bundle"
        bundle = build(target, drafter, out, engine="tensorrt-rtx", options=options, max_seq_len=length)
        seconds, attention = time.perf_counter() - begin, attention_of(bundle, capability)
        rows = []
        for role, plan in bundle.manifest["tensorrt"]["plans"][str(capability)].items():
            data = (bundle.path / plan["plan"]).read_bytes()
            rows.append(
                {
                    "pair": name,
                    "role": role,
                    "capability": capability,
                    "capacity": bundle.capacity,
                    **asdict(attention[role]),
                    "distinct_kernels": sum(distinct_kernels(data).values()),
                    "scratch_bytes": plan["activation_bytes"],
                    "plan_bytes": len(data),
                    "seconds": seconds,
                }
            )
        return rows


def _cache_of(graph: Path) -> tuple[int, int]:
    """Key and value heads of a layer's cache, and their size."""
    model = onnx.load(graph, load_external_data=False)
    cache = next(value for value in model.graph.input if "_cache." in value.name)
    dims = cache.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", default=["tiny", "tiny-gpt-oss", *WIDE])
    parser.add_argument("--capability", nargs="+", type=int, default=[89, 120])
    parser.add_argument("--max-seq-len", nargs="+", type=int, default=[4096, 32768])
    parser.add_argument("--max-batch-size", type=int, default=8)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "| pair | plan | SM | rows | attention kernels | query heads per key head | skip tiles | "
        "elements copied | distinct kernels | scratch memory | plan | both built in |"
    )
    print("|---" * 12 + "|")
    for name in args.pairs:
        for capability in args.capability:
            for length in args.max_seq_len if name in WIDE else [900]:
                for row in measured(name, capability, length, args.max_batch_size):
                    group, copied = ", ".join(map(str, row["group"])), sum(row["copies"].values())
                    print(
                        f"| {name} | {row['role']} | {capability} | {row['capacity']} | {row['kernels']} | {group} | "
                        f"{row['skipping']} | {copied / 1e6:.1f}M | {row['distinct_kernels']} | "
                        f"{row['scratch_bytes'] / 1e6:.1f} MB | {row['plan_bytes'] / 1e6:.1f} MB | "
                        f"{row['seconds']:.0f} s |",
                        flush=True,
                    )
                    rows.append(row)
    print(json.dumps({"processor": processor(), "plans": rows}))


if __name__ == "__main__":
    main()
