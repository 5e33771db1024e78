"""The kernel of Gated DeltaNet in Triton's interpreter: the recurrence, and equal bits however its rows came."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import onnx_ir as ir
import pytest
import torch
from dflash_plugins import layers as launch
from dflash_plugins.dialect import TensorRTLayerPlugins

from dflash_trt.checkpoint.schema import PENDING_ROWS, LayerDeltaNet
from dflash_trt.engines.torch import layers
from tests.doubles import plugin_graph

Tensors = dict[str, torch.Tensor]
# A key of 12 numbers does not fill its register, and 12 columns are one program and a half.
KIND = LayerDeltaNet(key_heads=1, value_heads=2, key_dim=12, value_dim=12, kernel=4, fused=False)
STATE = KIND.value_heads, KIND.key_dim, KIND.value_dim


@dataclass
class Sequence:
    """All rows of a sequence, and its caches: the state after `position` rows, and what waits behind them."""

    rows: Tensors
    state: torch.Tensor
    pending: Tensors
    position: int = 0


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def drawn(count: int, seed: int = 0) -> Sequence:
    """A new sequence, over the garbage of an earlier one."""
    rng = np.random.default_rng(seed)
    q, k = (torch.nn.functional.normalize(normal(rng, count, KIND.key_dim)) for _ in "qk")
    rows = {"q": q, "k": k, "v": normal(rng, count, KIND.value_heads * KIND.value_dim)}
    decay, beta = -rng.exponential(0.2, (count, KIND.value_heads)), rng.random((count, KIND.value_heads))
    rows["gates"] = torch.from_numpy(np.concatenate([decay, beta], 1).astype(np.float32))
    garbage = {name: torch.full((PENDING_ROWS, x.shape[1]), float("nan")) for name, x in rows.items()}
    return Sequence(rows, torch.full(STATE, float("nan")), garbage)


def inputs(batch: list[Sequence], starts: list[int], count: int, certain: int) -> Tensors:
    """A pass of `count` rows of each sequence from its start on."""
    pairs = list(zip(batch, starts, strict=True))
    new = {name: [each.rows[name][at : at + count] for each, at in pairs] for name in (*"qkv", "gates")}
    made = {
        name: torch.stack([torch.cat([s.pending[name], x]) for s, x in zip(batch, new[name], strict=True)])
        for name in "qkv"
    }
    made["gates"] = torch.stack(new["gates"])
    made["state"] = torch.stack([each.state for each in batch])
    made["pending_gates"] = torch.stack([each.pending["gates"] for each in batch])
    made["replayed"] = torch.tensor([at - each.position for each, at in pairs])
    made["certain"] = torch.full((len(batch),), certain)
    made["begun"] = torch.tensor([float(at > 0) for at in starts])
    return made


def run(batch: list[Sequence], starts: list[int], count: int, certain: int = 0) -> torch.Tensor:
    """y [B, count, values] of a pass. The sequences keep what it leaves."""
    y, state, gates = launch.gated_delta_net(**inputs(batch, starts, count, certain))
    for b, (each, start) in enumerate(zip(batch, starts, strict=True)):
        each.position, each.state = start + certain, state[b]
        waiting = (each.position + torch.arange(PENDING_ROWS)).clamp(max=start + count - 1)
        each.pending = {name: x[waiting] for name, x in each.rows.items()}
        assert torch.equal(gates[b], each.pending["gates"])
    return y


@pytest.mark.parametrize(("count", "certain"), [(1, 0), (16, 0), (7, 3), (20, 19), (5, 5)])
def test_the_kernel_is_the_recurrence(count: int, certain: int) -> None:
    """One new sequence, and two with rows to replay. The body for TensorRT is the kernel."""
    rng = np.random.default_rng(count)
    batch, starts = [drawn(40, seed) for seed in range(3)], [0, 16, 9]
    for each in batch[1:]:
        each.state = normal(rng, *STATE)
        each.pending = {name: x[:PENDING_ROWS] for name, x in each.rows.items()}
    given = inputs(batch, starts, count, certain)
    body = TensorRTLayerPlugins(ir.DataType.BFLOAT16).gated_delta_net(KIND)
    made = plugin_graph.run(body, given, {})
    wide = {name: x.nan_to_num().double() for name, x in given.items() if x.is_floating_point()}
    wanted = layers.gated_delta_net({}, **given | wide)
    for got, want in zip(made, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_bits_do_not_depend_on_how_a_prompt_is_cut() -> None:
    """Five rows in all 16 ways. All rows but the last of a pass enter the state; the next pass replays that one."""
    want = run([drawn(5)], [0], 5, 5)[0]
    for cuts in product((False, True), repeat=4):
        each = drawn(5)
        for start, end in pairwise([0, *(i for i, cut in enumerate(cuts, 1) if cut), 5]):
            y = run([each], [start], end - start, end - start - 1)
            assert torch.equal(y[0], want[start:end])


def test_bits_do_not_depend_on_how_many_drafts_are_taken() -> None:
    """Blocks of which 0 to 15 drafts are accepted, so that 1 to 16 rows are replayed."""
    each, start = drawn(90), 0
    want = run([drawn(90)], [0], 90, 90)[0]
    for kept in (16, 1, 2, 3, 6, 9, 13, 15, 16):
        count = 16 - kept % 2 * (16 - kept) // 2
        y = run([each], [start], count)
        assert torch.equal(y[0], want[start : start + count])
        start += kept
