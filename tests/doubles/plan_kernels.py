"""The attention of a plan of TensorRT-RTX, read from the plan's own kernels, which it holds as CUDA C++ text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import onnx

from dflash_trt.bundle.manifest import Bundle

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


def attention_of(bundle: Bundle, capability: int) -> dict[str, Attention]:
    """The attention of a bundle's plans, by role."""
    built, found = bundle.manifest["tensorrt"], {}
    for role, plan in built["plans"][str(capability)].items():
        heads, size = _cache_of(bundle.path / f"{role}.onnx")
        elements = max(1, built["max_batch_size"] // 2) * heads * bundle.capacity * size
        found[role] = read_attention((bundle.path / plan["plan"]).read_bytes(), elements)
    return found


def _cache_of(graph: Path) -> tuple[int, int]:
    """Key and value heads of a layer's cache, and their size."""
    model = onnx.load(graph, load_external_data=False)
    cache = next(value for value in model.graph.input if "_cache." in value.name)
    dims = cache.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value
