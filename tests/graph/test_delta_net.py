"""The operators of Gated DeltaNet, each body compared with the recurrence in float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from dflash_trt.checkpoint.schema import PENDING_ROWS, LayerDeltaNet
from dflash_trt.engines.torch.layers import gated_delta_net
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.delta_net import causal_conv, onnxruntime_delta
from tests.doubles import sessions

KIND = LayerDeltaNet(key_heads=2, value_heads=6, key_dim=16, value_dim=24, kernel=4, fused=False)
RNG = np.random.default_rng(0)


def session(body: ir.Function) -> ort.InferenceSession:
    g = GraphBuilder("one")
    inputs = [g.input(v.name or "", v.dtype or FLOAT, list(v.shape or ())) for v in body.inputs]
    outputs = g.call(body, *inputs, outputs=len(body.outputs), name="it")
    for value, made in zip(body.outputs, outputs, strict=True):
        g.output(made, value.name or "", value.dtype or FLOAT, list(value.shape or ()))
    return sessions.session(g.model())


def places(batch: int, count: int, certain: int) -> dict[str, np.ndarray]:
    replayed = RNG.integers(0, PENDING_ROWS + 1, batch)
    begun = np.ones(batch, np.float32)
    begun[0], replayed[0] = 0, 0  # a new sequence, over the garbage of an earlier one
    found = RNG.integers(0, certain + 1, batch)
    found[-1] = certain
    return {"replayed": replayed, "certain": found, "begun": begun}


@pytest.mark.parametrize(("count", "certain"), [(1, 0), (16, 0), (7, 3), (50, 49), (33, 33)])
@pytest.mark.parametrize("few", [True, False])
def test_convolution_of_replayed_and_new_rows(count: int, certain: int, few: bool) -> None:
    batch, before = 3, KIND.kernel - 1
    at = places(batch, count, certain)
    x, history, pending = (
        RNG.normal(size=(batch, n, KIND.channels)).astype(np.float32) for n in (count, before, PENDING_ROWS)
    )
    weight = RNG.normal(size=(KIND.channels, 1, KIND.kernel)).astype(np.float32)
    feeds = {"x": x, "history": history, "pending": pending, "weight": weight} | at
    y, new_history, new_pending = session(causal_conv(KIND, FLOAT, few=few)).run(None, feeds)
    offset = y.shape[1] - count
    assert offset == (at["replayed"].max() if few else PENDING_ROWS)
    for b in range(batch):
        n, m = at["replayed"][b], at["certain"][b]
        rows = np.concatenate([history[b] * at["begun"][b], pending[b, :n], x[b]]).astype(np.float64)
        mixed = sum(rows[j : j + n + count] * weight[:, 0, j] for j in range(KIND.kernel))
        mixed = mixed / (1 + np.exp(-mixed))
        np.testing.assert_allclose(y[b, :n], mixed[:n], atol=1e-5)
        np.testing.assert_allclose(y[b, offset:], mixed[n:], atol=1e-5)
        np.testing.assert_array_equal(new_history[b], rows[n + m : n + m + before])
        kept = min(count - m, PENDING_ROWS)
        np.testing.assert_array_equal(new_pending[b, :kept], x[b, m : m + kept])


@pytest.mark.parametrize(("count", "certain"), [(1, 0), (16, 0), (7, 3), (50, 49), (33, 33)])
@pytest.mark.parametrize("pending_rows", [None, PENDING_ROWS])
@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_recurrence_over_replayed_and_new_rows(
    pending_rows: int | None, count: int, certain: int, alike: float
) -> None:
    """`pending_rows`: all, or as many as some sequence replays. `alike`: how nearly parallel the keys are."""
    batch, heads = 3, KIND.value_heads
    at = places(batch, count, certain)
    total = (int(at["replayed"].max()) if pending_rows is None else pending_rows) + count

    def unit(*shape: int) -> np.ndarray:
        x = (1 - alike) * RNG.normal(size=shape) + alike * RNG.normal(size=shape[-1])
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (unit(batch, total, KIND.key_heads, KIND.key_dim).astype(np.float32) for _ in "qk")
    v = RNG.normal(size=(batch, total, heads, KIND.value_dim)).astype(np.float32)

    def gates(n: int) -> np.ndarray:
        decay, beta = -RNG.exponential(0.2, (batch, n, heads)), RNG.uniform(0, 1, (batch, n, heads))
        return np.concatenate([decay, beta], -1).astype(np.float32)

    new, pending = gates(count), gates(PENDING_ROWS)
    state = RNG.normal(size=(batch, heads, KIND.key_dim, KIND.value_dim)).astype(np.float32)
    feeds = {
        "q": q.reshape(batch, total, -1),
        "k": k.reshape(batch, total, -1),
        "v": v.reshape(batch, total, -1),
        "gates": new,
        "state": state,
        "pending_gates": pending,
    } | at
    y, new_state, new_pending = session(onnxruntime_delta(KIND)).run(None, feeds)
    given = {name: torch.from_numpy(each) for name, each in feeds.items()}
    wide = {name: x.double() for name, x in given.items() if x.is_floating_point()}
    want_y, want_state, want_pending = (x.numpy() for x in gated_delta_net({}, **given | wide))
    for b in range(batch):
        defined = count if count <= PENDING_ROWS else at["certain"][b] + 1
        np.testing.assert_allclose(y[b, :defined], want_y[b, :defined], atol=2e-5)
    np.testing.assert_allclose(new_state, want_state, atol=2e-5)
    np.testing.assert_array_equal(new_pending, want_pending)
