"""Kernels that do not compile here, or give other numbers: torch's operators take their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_plugins import compiler, packed
from dflash_plugins.launch import by_triton

from dflash_trt.engines.torch import kernels, layers, opening
from dflash_trt.engines.torch import packed as packed_weights
from dflash_trt.engines.torch.packed import _tile, plain
from dflash_trt.errors import BuildError
from tests.doubles.packed_weights import random_weight


def test_tiles_that_do_not_compile_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    q = torch.randn(1, 2, 3, 64).half()
    cache, rows = torch.randn(1, 1, 16, 64).half(), torch.tensor([[0, 1, 2]])
    given = {"scale": 0.125}, q, cache, cache, rows * 0, rows
    tried: list[Any] = []

    def run(use: Any, *grid: Any, **arguments: Any) -> None:
        if use.function == "attend":
            tried.append(use)
            if use in tried[:2]:
                raise BuildError("it writes nothing")
        by_triton(use, *grid, **arguments)

    exact = layers.attend(*given)
    monkeypatch.setattr(kernels, "of", lambda x: kernels.LayerKernels(run))
    for _ in range(2):
        torch.testing.assert_close(layers.attend(*given), exact, atol=2e-3, rtol=0)
    assert tried[:3] == tried[3:], "the third tile stays the first one that compiles"
    assert len(set(map(str, tried))) == 3
    assert not caplog.text

    def never(*given: Any, **arguments: Any) -> None:
        raise BuildError("ptxas refused it")

    monkeypatch.setattr(kernels, "of", lambda x: kernels.LayerKernels(never))
    for _ in range(2):
        torch.testing.assert_close(layers.attend(*given), exact, atol=2e-3, rtol=0)
    assert caplog.text.count("no kernel of ours for attention on this GPU: ptxas refused it") == 1


def test_without_a_compiler_torchs_operators_and_the_host_do_the_work(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.setattr(compiler, "trial", lambda: "Triton cannot be imported")
    gpu.setattr(compiler, "no_compiler", lambda: "Triton cannot be imported")
    kernels._of_this_gpu.cache_clear()
    assert kernels._of_this_gpu() is None
    assert opening._kernels([]) is None
    kernels._of_this_gpu.cache_clear()
    assert "Triton cannot be imported; torch's operators take the place of all kernels" in caplog.text


def test_a_tile_whose_rows_depend_on_their_number_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction of few rows may add in another order: then all rows get that of many."""
    right = packed.product

    def by_tokens(x: torch.Tensor, weight: packed.PackedWeight, *given: Any) -> Any:
        few = weight.tile.tokens_of(len(x)) < packed.ROWS[-1]
        return right(x, weight, *given) * (1 + few / 128)

    layer = kernels.LayerKernels(by_triton)
    monkeypatch.setattr(kernels, "of", lambda x: layer)
    weight = torch.randn(32, 128).bfloat16()
    assert len(made(weight).tile.tokens) > 1
    layer.packed.clear()
    monkeypatch.setattr(packed, "product", by_tokens)
    assert made(weight).tile.tokens == packed.ROWS[-1:]
    monkeypatch.setattr(packed, "product", lambda x, *given: right(x, *given) * 1.05)
    layer.packed.clear()
    assert plain(weight) is weight
    assert isinstance(plain(weight.float()), torch.Tensor)
    assert layer.missing == {"products", "products in float32"}


def test_so_is_one_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    right, layer = packed.experts_product, kernels.LayerKernels(by_triton)
    stored, wide = random_weight(packed.Packing(32, 128, "int4", "bf16", group=32, experts=5))
    dense = wide.to(torch.bfloat16)

    def by_tokens(x: torch.Tensor, weight: packed.PackedWeight, *given: Any) -> Any:
        few = weight.tile.tokens_of(-(-2 * len(x) // 5)) < packed.ROWS[-1]
        return right(x, weight, *given) * (1 + few / 128)

    monkeypatch.setattr(packed, "experts_product", by_tokens)
    tile = _tile(layer, stored, dense.dtype, lambda expert: dense[expert])
    assert tile is not None
    assert tile.tokens == packed.ROWS[-1:]


def made(weight: torch.Tensor) -> packed.PackedWeight:
    found = plain(weight)
    assert isinstance(found, packed.PackedWeight)
    return found


def test_tiles_are_timed_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The order of time is kept beside the compiled kernels. The tile of one instruction stays the last one."""
    monkeypatch.setenv("DFLASH_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    timed = list[float]()

    def seconds(call: Any) -> float:
        timed.append(-len(timed))
        return timed[-1]

    monkeypatch.setattr(packed_weights, "_seconds", seconds)
    monkeypatch.setattr(packed_weights, "_random", lambda *given: SimpleNamespace(is_cuda=True))
    weight = packed.plain(torch.zeros(32, 128).bfloat16())
    *tiles, last = weight.form.tiles
    for _ in range(2):
        found = packed_weights._fastest(by_triton, weight, torch.bfloat16)
        assert found == [*tiles[::-1], last]
    assert len(timed) == len(tiles)


@pytest.mark.parametrize(("wrong", "experts"), [("widen", 0), ("product", 0), ("experts_product", 3)])
def test_a_kernel_with_other_numbers_is_not_used(
    wrong: str, experts: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer is then widened, as where no kernel compiles. Of a stack, two experts are tried."""
    right = getattr(packed, wrong)
    stored, wide = random_weight(packed.Packing(32, 128, "int4", "bf16", group=32, experts=experts))
    dense = wide.to(torch.bfloat16).view(-1, 32, 128)
    layer, asked = kernels.LayerKernels(by_triton), list[int]()

    def widened(expert: int) -> Any:
        asked.append(expert)
        return dense[expert]

    for each in (stored, replace(stored, codes=stored.codes * 0)):  # which is not tried: its form was
        assert _tile(layer, each, dense.dtype, widened) is not None
    assert asked == ([0, 2] if experts else [0])
    nothing = replace(stored, codes=stored.codes * 0)
    assert _tile(kernels.LayerKernels(by_triton), nothing, dense.dtype, lambda _: dense[0] * 0) is not None
    monkeypatch.setattr(packed, wrong, lambda *given: right(*given) * 1.05)
    assert _tile(kernels.LayerKernels(by_triton), stored, dense.dtype, dense.__getitem__) is None
    assert "no kernel of ours for packed weights on this GPU" in caplog.text
