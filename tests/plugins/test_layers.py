"""The kernels between products in Triton's interpreter, against torch's operators, and the graph that they stand in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as launch
from dflash_plugins.kernel_table import MOE_ROUTE
from dflash_plugins.launch import TYPE_NAMES, by_triton, call

from dflash_trt.engines.torch import kernels, layers

TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
# One rounding of the largest number, in the type.
ROUNDING = {torch.float32: 1e-6, torch.float16: 2**-10}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    largest = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=4 * ROUNDING[got.dtype] * largest)


@TYPES
@pytest.mark.parametrize("hidden", [64, 96])
def test_a_residual_sum_and_its_norm(hidden: int, dtype: torch.dtype) -> None:
    x, y, weight = (
        drawn(3, hidden, dtype=dtype),
        drawn(3, hidden, dtype=dtype) * 2,
        drawn(hidden, dtype=dtype),
    )
    total, normed = launch.add_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    close(normed, layers.rms_norm({"epsilon": 1e-5}, x + y, weight))
    wide = layers.rms_norm({"epsilon": 1e-5}, total.float(), weight.float() + 2**-12)
    for got, expected in zip(
        layers.add_norm({"epsilon": 1e-5}, x, y, weight.float() + 2**-12),
        (total, wide.to(dtype)),
        strict=True,
    ):
        assert torch.equal(got, expected)


@TYPES
def test_a_gated_activation(dtype: torch.dtype) -> None:
    x = drawn(3, 2 * 1100, dtype=dtype)
    close(launch.gate(x)[0], (torch.nn.functional.silu(x[:, :1100].float()) * x[:, 1100:].float()).to(dtype))


@TYPES
@pytest.mark.parametrize("biased", [True, False])
def test_a_router(dtype: torch.dtype, *, biased: bool) -> None:
    x, weight, bias = drawn(3, 700, dtype=dtype), drawn(10, 700), drawn(10) if biased else None
    got = launch.router(x, weight, bias)
    close(got, layers.router({}, x, weight, bias))
    assert torch.equal(launch.router(x[1:2].contiguous(), weight, bias), got[1:2])


@TYPES
@pytest.mark.parametrize("rows", [3, 16, 17])
@pytest.mark.parametrize("arranged", [True, False])
def test_a_norm_and_a_router_are_one_kernel(rows: int, dtype: torch.dtype, *, arranged: bool) -> None:
    """It gives what three kernels would, and for few rows what follows from that."""
    k, x, y, norm = 3, *(drawn(*shape, dtype=dtype) for shape in ((rows, 200), (rows + 1, 200), (200,)))
    weight, bias, counter = drawn(10, 200), drawn(10), torch.zeros(1, dtype=torch.int32)
    more: dict[str, Any] = {"counter": counter, "k": k, "arranged": arranged}
    *normed, found = launch.norm_router(x, y[:rows], norm, 1e-5, weight, bias, **more)
    total, expected = launch.add_norm(x, y[:rows], norm, 1e-5)
    assert all(map(torch.equal, normed, (total, expected)))
    assert int(counter) == 0
    logits = launch.router(expected, weight, bias)
    if rows > uses.ROUTE_ROWS:
        assert torch.equal(found, logits)
    else:
        routed = call(by_triton, MOE_ROUTE, logits, expected if arranged else None, k=k, grouped=True)
        assert found.keys() == routed.keys()
        assert all(torch.equal(found[name], routed[name]) for name in routed)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("dtype", TYPE_NAMES, ids=TYPE_NAMES.values())
@pytest.mark.parametrize("vocab", [300, 4097, 9001])
def test_best_tokens(vocab: int, dtype: torch.dtype) -> None:
    """Of several largest logits the first, whatever other rows a pass has. No log-probability of a NaN is finite."""
    logits = 3 * drawn(5, vocab, dtype=dtype)
    logits[1] = 0.5
    logits[2, : vocab - 1] = -torch.inf
    logits[3, vocab - 200] = logits[3, 150] = 20
    logits[4, 0], logits[4, 1:] = -0.0, -logits[4, 1:].abs()
    token, logprob = launch.best_token(logits)
    expected, place = logits.float().log_softmax(-1).max(-1, keepdim=True)
    assert token.tolist() == logits.argmax(-1, keepdim=True).tolist() == place.tolist()
    assert token[1:4, 0].tolist() == [0, vocab - 1, 150 if vocab > 350 else 100]
    torch.testing.assert_close(logprob, expected, rtol=0, atol=4e-6)
    assert all(map(torch.equal, layers.best_token({}, logits), (place, expected)))
    assert torch.equal(launch.best_token(logits[3:4].clone())[1], logprob[3:4])
    logits[0, vocab // 2], logits[2, 0], logits[3], logits[4] = torch.nan, torch.inf, -torch.inf, torch.nan
    token, logprob = launch.best_token(logits)
    assert logprob[:, 0].isfinite().tolist() == [False, True, False, False, False]
    assert token[:, 0].tolist() == [vocab // 2, 0, 0, 0, 0]


KINDS = {
    "queries, keys and values, normed and rotated": ("qkv", True, 1.0),
    "of gpt-oss": ("qkv", False, 1.0),
    "rotated in part": ("qkv", True, 0.5),
    "not rotated": ("qkv", True, 0),
    "queries alone": ("q", True, 1.0),
    "keys and values": ("kv", True, 1.0),
    "values alone": ("v", False, 0),
}


@TYPES
@pytest.mark.parametrize(("kinds", "normed", "turned"), KINDS.values(), ids=KINDS)
def test_heads(
    kinds: str, turned: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, normed: bool
) -> None:
    batch, count, size, capacity = 2, 3, 48, 11
    counts = {"q": 4, "k": 2, "v": 2}
    x = drawn(batch * count, sum(counts[kind] for kind in kinds) * size, dtype=dtype)
    norms = [drawn(size + i, dtype=dtype)[:size].clone() if normed else None for i in range(2)]
    pairs = int(size * turned / 2)
    angles = drawn(batch, count, pairs) if pairs else None
    turns = [None, None] if angles is None else [angles.cos().to(dtype), angles.sin().to(dtype)]
    caches = [
        drawn(batch, counts[kind], capacity, size, dtype=dtype) if kind in kinds else None for kind in "kv"
    ]
    heads = [counts[kind] for kind in kinds]
    attributes: dict[str, Any] = {"epsilon": 1e-6, "kinds": kinds, "heads": heads, "size": size}
    results = []
    for run in (None, kernels.LayerKernels(by_triton)):
        monkeypatch.setattr(kernels, "of", lambda x, run=run: run)
        own = [None if cache is None else cache.clone() for cache in caches]
        start = torch.tensor([5, 0]) if kinds != "q" else None
        results.append(layers.place_heads(attributes, x, [batch, count], *norms, None, *turns, start, *own))
    for got, expected in zip(*reversed(results), strict=True):
        close(got, expected)
    for cache, got in zip(caches, results[1][1 if "q" in kinds else 0 :], strict=False):
        if cache is not None:
            assert torch.equal(got[0, :, :5], cache[0, :, :5]), "rows before `start` stay"
