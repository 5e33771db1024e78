"""A product that places its heads, in Triton's interpreter: it gives the bits of the two kernels that it joins."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from dflash_plugins import layers, packed
from dflash_plugins.kernel_specs import Use
from dflash_plugins.launch import by_triton

from dflash_trt.engines.torch.layers import in_bytes
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.packed_weights import random_weight

# Queries, keys and values; the numbers of a head, and how many are rotated; a weight's form without its outputs.
PLAIN = {"inputs": 1030, "codes": "plain"}
FP8 = {"inputs": 1024, "codes": "e4m3", "scales": "bf16"}
KINDS = {
    "Qwen3": ((2, 1, 1), 128, 128, {"normed"}, PLAIN),
    "Qwen3 in FP8": ((2, 1, 1), 128, 128, {"normed", "scaled"}, FP8),
    "gpt-oss": ((4, 2, 2), 64, 64, {"biased"}, PLAIN),
    "a wide head, rotated in part": ((1, 1, 1), 256, 64, {"normed"}, PLAIN),
    "one part of the inputs": ((2, 1, 1), 64, 64, {"normed", "biased"}, PLAIN | {"inputs": 96}),
    "queries of a drafter": ((2, 0, 0), 128, 128, {"normed"}, PLAIN),
    "keys and values": ((0, 1, 1), 64, 64, set[str](), PLAIN),
    "values alone": ((0, 0, 2), 64, 0, set[str](), PLAIN),
}
CACHES = {"slots": set[str](), "regions": {"region"}, "FP8": {"fp8"}, "FP8 regions": {"region", "fp8"}}


@pytest.mark.parametrize(("name", "cache"), [*zip(KINDS, cycle(CACHES)), *zip(KINDS, cycle([*CACHES][::-1]))])
def test_a_product_places_its_heads(name: str, cache: str) -> None:
    """At 1 to 64 rows, of a sequence or of several. A number that is not finite stays one."""
    (heads, size, turned, has, stored), held = KINDS[name], CACHES[cache]
    dtype, generator = torch.bfloat16 if size == 64 else torch.float16, torch.Generator().manual_seed(size)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    launched = list[str]()

    def run(use: Use, *grid: Any, **arguments: Any) -> None:
        launched.append(use.function)
        by_triton(use, *grid, **arguments)

    weight, _ = random_weight(packed.Packing(sum(heads) * size, **stored), dtype=dtype)
    queries, *others = heads
    bias = drawn(sum(heads) * size) if "biased" in has else None
    for batch, count in ((1, 1), (2, 3), (4, 16) if name == "gpt-oss" else (2, 10)):
        rows, capacity = batch * count, 40
        assert packed.joins_heads(rows, weight, size)
        x = drawn(rows, weight.form.inputs) / 32
        x[rows // 2, 0] = torch.inf
        factor = drawn(rows, 1).float() if "scaled" in has else None
        norms = {f"{kind}_norm": drawn(size) for kind in "qk"} if "normed" in has else {}
        angles = torch.randn(rows, turned // 2, generator=generator)
        turns = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)} if turned else {}
        shared = capacity * batch if "region" in held else capacity
        caches = {
            f"{kind}_cache": drawn(1 if "region" in held else batch, n, shared, size)
            for kind, n in zip("kv", others, strict=True)
            if n
        }
        more: dict[str, Any] = norms | turns | {"epsilon": 1e-6}
        if any(others):
            more["start"] = torch.randint(0, capacity - count, (batch,), generator=generator)
        if "region" in held and any(others):
            more["region"] = torch.arange(batch).flip(0) * capacity
        results = []
        launched.clear()
        for joined in (False, True):
            own = {n: in_bytes(c) if "fp8" in held else c.clone() for n, c in caches.items()}
            if joined:
                y, placing = (
                    x.new_empty(rows, weight.form.outputs),
                    packed.by_product(x, weight, bias, factor, run),
                )
            else:
                y, placing = packed.product(x, weight, bias, run, factor), run
            q = layers.place_heads(y, count, size, queries, **more, **own, run=placing)
            results.append([*([] if q is None else [q]), *own.values()])
        assert launched == ["product", "place_heads", "product_heads"]
        for both in zip(*results, strict=True):
            whole = [x if x.dtype == torch.uint8 else x.view(torch.int16) for x in both]
            assert torch.equal(*whole)
        assert weight.counters is not None
        assert not weight.counters.any()


def test_what_is_not_joined() -> None:
    weight, _ = random_weight(packed.Packing(128, 64, "plain"))
    assert weight.tile.block_n == 64
    joined = [(64, 64), (64, 128), (65, 64), (64, 32), (64, 96)]
    assert [packed.joins_heads(rows, weight, size) for rows, size in joined] == [
        True,
        True,
        False,
        False,
        False,
    ]
