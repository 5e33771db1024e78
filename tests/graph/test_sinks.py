"""Attention with a sink on ONNX Runtime, compared with a softmax in float64."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from dflash_trt.graph.builder import FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import SINK_PADDING, AttentionKind
from dflash_trt.graph.onnxruntime import OnnxRuntime
from tests.doubles.sessions import session


def test_masks_with_other_inputs_have_other_names() -> None:
    """A graph has one body for each name."""
    kinds = (
        AttentionKind(4, 2, 16, False, sinks, trees) for sinks in (False, True) for trees in (False, True)
    )
    assert len({kind.mask_name for kind in kinds}) == 4


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("sink", [-1e30, -30.0, 0.0, 30.0, 1e4, 1e30])
def test_attention_with_a_sink(sink: float, window: int | None) -> None:
    """Compared with a softmax over the visible scores and the sink, at row 1500 of a cache full of garbage."""
    rng = np.random.default_rng(0)
    heads, kv_heads, size, start, count, capacity = 4, 2, 16, (1500, 1350), 5, 1600
    q = rng.normal(0, 2, (2, heads, count, size)).astype(np.float32)
    past = [rng.normal(0, 2, (2, kv_heads, capacity, size)).astype(np.float32) for _ in "kv"]
    new = [rng.normal(0, 2, (2, kv_heads, count, size)).astype(np.float32) for _ in "kv"]
    sinks = np.array([sink, sink + 1, 0, sink / 2], np.float32)
    padded = np.zeros((2, kv_heads, capacity, size + SINK_PADDING), np.float32)
    padded[..., :size] = past[0]
    for row, n in enumerate(start):
        padded[row, :, n:] = rng.normal(0, 30, padded[row, :, n:].shape)
    last = np.array(start)[:, None] + np.arange(count)
    first = np.zeros_like(last) if window is None else last - (window - 1)
    kind = AttentionKind(heads, kv_heads, size, windowed=window is not None, sinks=True)
    y = _sink_session(kind).run(
        ["y"],
        {
            "q": by_row(q),
            "k": by_row(new[0]),
            "v": by_row(new[1]),
            "k_cache": by_row(padded),
            "v_cache": by_row(past[1]),
            "start": np.array(start),
            "first": first,
            "last": last,
            "lengths": np.array(start) + count,
            "sinks": sinks,
        },
    )[0]
    y = y.reshape(2, count, heads, size).transpose(0, 2, 1, 3)
    for row, n in enumerate(start):
        k, v = (np.concatenate([p[row, :, :n], x[row]], axis=1) for p, x in zip(past, new, strict=True))
        k, v = (np.repeat(x, heads // kv_heads, axis=0).astype(np.float64) for x in (k, v))
        scores = q[row] @ k.transpose(0, 2, 1) * size**-0.5
        rows = np.arange(n + count)
        visible = (rows >= first[row][:, None]) & (rows <= last[row][:, None])
        scores = np.where(visible, scores, -np.inf)
        highest = np.maximum(scores.max(-1), sinks[:, None])[..., None]
        shares = np.exp(scores - highest)
        total = shares.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - highest)
        np.testing.assert_allclose(y[row], shares / total @ v, atol=2e-5)


def by_row(x: np.ndarray) -> np.ndarray:
    """[B, heads, rows, size] -> [B, rows, heads*size]."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(x.shape[0], x.shape[2], -1)


def _sink_session(kind: AttentionKind) -> ort.InferenceSession:
    """The sink's mask and attention alone."""
    g, dialect = GraphBuilder("sink"), OnnxRuntime()
    q = g.input("q", FLOAT, ["B", "S", kind.heads * kind.head_dim])
    rows = [g.input(name, FLOAT, ["B", "S", kind.kv_heads * kind.head_dim]) for name in "kv"]
    shapes = dialect.cache_shapes(kind.kv_heads, kind.head_dim, "C", sinks=True)
    caches = [g.input(f"{name}_cache", FLOAT, shape) for name, shape in zip("kv", shapes, strict=True)]
    start, lengths = g.input("start", INT64, ["B"]), g.input("lengths", INT64, ["B"])
    first, last = g.input("first", INT64, ["B", "S"]), g.input("last", INT64, ["B", "S"])
    sinks = g.input("sinks", FLOAT, [kind.heads])
    capacity = g.dim(caches[0], 1)
    mask = g.call(dialect.attention_mask(kind), first, last, lengths, capacity, outputs=3, name="mask")
    inputs = (q, *rows, *caches, start, *mask, lengths, sinks)
    y, *_ = g.call(dialect.attention(kind), *inputs, outputs=3, name="attention")
    y = g.op("Reshape", y, g.constant([0, 0, -1]))
    g.output(y, "y", FLOAT, ["B", "S", kind.heads * kind.head_dim])
    return session(g.model())
