"""The MoE kernels in Triton's interpreter, against the operator in NumPy and its function body in ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as moe
from dflash_plugins.dialect import TensorRTPlugins
from dflash_plugins.kernel_table import MOE_ROUTE
from dflash_plugins.kernels import moe as kernels
from dflash_plugins.launch import by_triton, call
from onnx.reference import ReferenceEvaluator

from dflash_trt.engines.torch import layers
from dflash_trt.graph.tensorrt import TensorRT
from tests.doubles import plugin_graph
from tests.doubles.formats import unpack_blocks
from tests.doubles.triton_interpreter import to_numpy


def layer(
    rng: np.random.Generator, experts: int, hidden: int, inner: int, k: int, *, biased: bool
) -> moe.PackedExperts:
    def matrix(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 125, (experts, rows, columns // 32), dtype=np.uint8)
        bias = torch.from_numpy(rng.standard_normal((experts, rows))).bfloat16() if biased else None
        return torch.from_numpy(blocks), torch.from_numpy(scales), bias

    return moe.PackedExperts(
        *matrix(2 * inner, hidden), *matrix(hidden, inner), k=k, alpha=1.702, beta=1.0, limit=7.0
    )


def _moe(
    x: np.ndarray,
    logits: np.ndarray,
    gate_up: Any,
    down: Any,
    *,
    k: int,
    alpha: float,
    beta: float,
    limit: float,
) -> np.ndarray:
    """The operator in NumPy: sums in float64, rounded where the kernels round."""

    def linear(x: np.ndarray, weights: Any, expert: int) -> np.ndarray:
        blocks, scales, bias = weights
        product = unpack_blocks(blocks[expert], scales[expert]).astype(np.float64) @ x
        return product if bias is None else product + bias[expert].astype(np.float64)

    y = np.zeros(x.shape)
    for row in range(len(x)):
        best = np.argsort(-logits[row], kind="stable")[:k]
        share = np.exp(logits[row, best].astype(np.float64) - logits[row, best[0]])
        for expert, p in zip(best, share / share.sum(), strict=True):
            h = linear(x[row].astype(np.float64), gate_up, expert)
            gate, up = np.minimum(h[0::2], limit), np.clip(h[1::2], -limit, limit)
            h = ((up + beta) * gate / (1 + np.exp(-alpha * gate))).astype(x.dtype).astype(np.float64)
            y[row] += p * linear(h, down, expert)
    return y.astype(x.dtype)


def expected(x: torch.Tensor, logits: torch.Tensor, e: moe.PackedExperts) -> np.ndarray:
    gate_up, down = (
        (to_numpy(blocks), to_numpy(scales), None if bias is None else to_numpy(bias))
        for blocks, scales, bias in (
            (e.gate_up, e.gate_up_scales, e.gate_up_bias),
            (e.down, e.down_scales, e.down_bias),
        )
    )
    constants = {"k": e.k, "alpha": e.alpha, "beta": e.beta, "limit": e.limit}
    return _moe(to_numpy(x), logits.numpy(), gate_up, down, **constants)


@pytest.mark.parametrize(
    ("rows", "experts", "hidden", "inner", "k", "dtype", "biased"),
    [
        (1, 8, 64, 64, 4, torch.bfloat16, True),
        (5, 8, 160, 96, 4, torch.bfloat16, True),
        (10, 16, 96, 160, 4, torch.float16, False),
        (3, 5, 64, 32, 1, torch.bfloat16, False),
        (40, 4, 64, 64, 3, torch.bfloat16, True),  # more tokens of an expert than fit one step
    ],
)
def test_moe_is_the_reference_up_to_accumulation_order(
    rows: int, experts: int, hidden: int, inner: int, k: int, dtype: torch.dtype, biased: bool
) -> None:
    rng = np.random.default_rng(rows)
    e = layer(rng, experts, hidden, inner, k, biased=biased)
    x = torch.from_numpy(rng.standard_normal((rows, hidden)) / 8).to(dtype)
    logits = torch.from_numpy(rng.standard_normal((rows, experts)).astype(np.float32))
    y = moe.moe(x, logits, e).double().numpy()
    want = expected(x, logits, e).astype(np.float64)
    # One rounding of the result, and of hidden values that lie next to a tie.
    assert np.max(np.abs(y - want)) <= 2**-8 * np.max(np.abs(want))
    assert np.mean(np.abs(y - want) > 2**-9 * np.abs(want)) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_adds_the_experts_as_a_kernel_of_its_own_does(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    e = layer(rng, 8, 96, 64, 3, biased=False)
    x, y, weight = (torch.from_numpy(rng.standard_normal(n)).to(dtype) for n in ((5, 96), (5, 96), 96))
    logits = torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float32))
    parts = moe.moe(x, logits, e, apart=True)
    assert (parts.shape, parts.dtype) == ((5, 3 * uses.DOWN_PARTS, 96), torch.float32)
    expected = moe.add_norm(y, moe.moe(x, logits, e), weight, 1e-5)
    assert all(map(torch.equal, moe.add_norm(y, parts, weight, 1e-5), expected))
    assert torch.equal(layers.add_norm({}, y, parts, weight)[0], expected[0])  # without kernels


def test_every_cut_gives_the_same() -> None:
    rng = np.random.default_rng(0)
    e = layer(rng, 4, 192, 96, 2, biased=True)
    x = torch.from_numpy(rng.standard_normal((20, 192)) / 8).bfloat16()
    logits = torch.from_numpy(rng.standard_normal((20, 4)).astype(np.float32))
    first, *others = (moe.moe(x, logits, e, tile).float() for tile in uses.TILES)
    for y in others:
        assert torch.allclose(y, first, atol=2**-7 * y.abs().max().item(), rtol=0)


@pytest.mark.parametrize(
    ("dtype", "bytes_of_scales"),
    [(torch.bfloat16, [58, 64, 100, 127, 128, 150, 191]), (torch.float16, [104, 113, 120, 127, 128])],
)
def test_every_weight_is_exact(dtype: torch.dtype, bytes_of_scales: list[int]) -> None:
    """Tokens that are unit vectors give the weights."""
    count = len(bytes_of_scales)
    blocks = torch.arange(count * 16, dtype=torch.uint8).reshape(1, count, 1, 16) * 37
    scales = torch.tensor(bytes_of_scales, dtype=torch.uint8).reshape(1, count, 1)
    pairs, groups = torch.arange(32, dtype=torch.int32), torch.tensor([[0, 0, 32]], dtype=torch.int32)
    routed = torch.zeros(32, 1), torch.eye(32, dtype=dtype)
    units = call(by_triton, MOE_ROUTE, *routed, k=1)["arranged"]
    outputs = torch.empty(32, uses.DOWN_PARTS, count)
    use = uses.down(count, 32, "bf16" if dtype == torch.bfloat16 else "fp16", False, uses.TILES[0])
    given = units, torch.ones(32, 1), pairs, groups, blocks, scales
    kernels.down[(uses.DOWN_PARTS, 1)](*given, outputs=outputs, **use.launch)
    assert np.array_equal(outputs.sum(1).numpy().T, unpack_blocks(blocks[0].numpy(), scales[0].numpy()))


@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 4, 4), (16, 128, 4), (33, 7, 3), (300, 16, 2)])
def test_routing_groups_pairs_by_expert(rows: int, experts: int, k: int) -> None:
    logits = np.random.default_rng(rows).integers(-3, 4, (rows, experts)).astype(np.float32)  # ties
    logits[0, 0] = -np.inf
    shares, chosen, pairs, groups = (t.numpy() for t in moe.route(torch.from_numpy(logits), k))
    best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    expected = np.exp(np.take_along_axis(logits, best, 1))
    assert np.allclose(shares, expected / expected.sum(1, keepdims=True), atol=1e-6)
    assert np.array_equal(chosen, best)
    assert len(groups) == len({*groups[:, 0].tolist()}) == min(experts, rows * k)
    seen = []
    for expert, first, count in groups.tolist():
        mine = pairs[first : first + count].tolist() if count else []
        assert mine == [p for p in range(rows * k) if best[p // k, p % k] == expert]
        seen.append(count)
    assert sum(seen) == rows * k
    assert all(seen[: np.count_nonzero(seen)])  # those in use come first


def test_a_nan_reaches_its_token_and_no_other() -> None:
    """Of the hidden state, of a bias, of one logit and of all logits: the finite check must see it."""
    rng = np.random.default_rng(8)
    e = layer(rng, 6, 64, 64, 2, biased=True)  # not a power of 2
    x = torch.from_numpy(rng.standard_normal((5, 64))).bfloat16()
    logits = torch.from_numpy(rng.standard_normal((5, 6)).astype(np.float32))
    logits[:, 0], logits[0, 0] = -9, 9  # only token 0 goes to expert 0
    y = moe.moe(x, logits, e)
    assert bool(y.isfinite().all())
    x[1, 33], logits[2, 3], logits[3] = np.nan, np.nan, np.nan
    for row in (0, 1):  # a gate and its up row
        assert e.gate_up_bias is not None
        bias = e.gate_up_bias.clone()
        bias[0, row] = np.nan
        broken = moe.moe(x, logits, replace(e, gate_up_bias=bias))
        assert torch.equal(broken[4], y[4])
        assert broken[:4].isnan().all(1).tolist() == [True] * 4


@pytest.mark.parametrize("biased", [True, False])
def test_the_plugins_give_what_the_function_body_gives(biased: bool) -> None:
    """TensorRT's body in float32, on widened weights. Only BF16 causes differences."""
    rng = np.random.default_rng(5)
    e = layer(rng, 8, 64, 96, 4, biased=biased)
    x = torch.from_numpy(rng.standard_normal((6, 64)) / 4).bfloat16()
    router = torch.from_numpy(rng.standard_normal((6, 8)).astype(np.float32))
    constants = {"k": e.k, "alpha": e.alpha, "beta": e.beta, "limit": e.limit}
    tensors = {"x": x, "router_logits": router}
    feeds = {"x": x.float().numpy(), "router_logits": router.numpy()}
    sides = {
        "gate_up": (e.gate_up, e.gate_up_scales, e.gate_up_bias),
        "down": (e.down, e.down_scales, e.down_bias),
    }
    for name, (blocks, scales, bias) in sides.items():
        tensors |= {name: blocks.view(torch.int8), f"{name}_scales": scales.view(torch.int8)}
        feeds[name] = unpack_blocks(blocks.numpy(), scales.numpy())
        if bias is not None:
            tensors[f"{name}_bias"] = bias
            feeds[f"{name}_bias"] = bias.float().numpy()
    shape = {"biased": biased, "widened_bytes": 0}
    plugins = TensorRTPlugins(ir.DataType.BFLOAT16).moe("mxfp4", ir.DataType.INT8, **shape)
    (y,) = plugin_graph.run(plugins, tensors, constants)
    body = ir.to_proto(TensorRT(ir.DataType.FLOAT).moe("float", ir.DataType.FLOAT, **shape))
    (expected,) = ReferenceEvaluator(body).run(None, feeds, attributes=constants)
    assert np.max(np.abs(y.float().numpy() - expected)) < 2**-7 * np.max(np.abs(expected))
