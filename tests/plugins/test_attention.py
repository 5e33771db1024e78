"""The attention kernels in Triton's interpreter, against torch's operators and TensorRT's body in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as launch
from dflash_plugins import plugin_table
from dflash_plugins.dialect import TensorRTPlugins

from dflash_trt.engines.torch import layers
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import AttentionKind
from dflash_trt.graph.tensorrt import TensorRT
from tests.doubles import plugin_graph
from tests.doubles.sessions import session
from tests.doubles.trt_bodies import executable

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    monkeypatch.setattr(uses, "ATTENTION_PROGRAMS", 16)


def drawn(
    batch: int,
    heads: int,
    kv_heads: int,
    size: int,
    count: int,
    capacity: int,
    *,
    window: int | None = None,
    sinks: bool = False,
    tree: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensors:
    """The inputs of a pass at random positions. Cache rows behind each sequence's own hold NaN."""
    rng = np.random.default_rng(count)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(2 * rng.standard_normal(shape)).to(dtype)

    start = torch.from_numpy(rng.integers(0, capacity - count + 1, batch))
    start[0] = capacity - count
    depth = np.zeros((batch, count), np.int64)
    visible = np.zeros((batch, count, count), np.int32)
    for b, i in np.ndindex(batch, count):
        parent = int(rng.integers(0, i)) if tree and i else i - 1
        visible[b, i, i] = 1
        if i:
            visible[b, i] |= visible[b, parent]
            depth[b, i] = depth[b, parent] + 1
    last = start[:, None] + torch.from_numpy(depth)
    made = {
        "q": numbers(batch, heads, count, size),
        "k_cache": numbers(batch, kv_heads, capacity, size),
        "v_cache": numbers(batch, kv_heads, capacity, size),
        "first": torch.zeros_like(last) if window is None else last - (window - 1),
        "last": last,
    }
    for b, at in enumerate(start.tolist()):
        for cache in (made["k_cache"], made["v_cache"]):
            cache[b, :, at + count :] = float("nan")
    if tree:
        made |= {"start": start, "visible": torch.from_numpy(visible)}
    if sinks:
        made["sinks"] = numbers(heads)
    return made


def expected(given: Tensors) -> np.ndarray[Any, Any]:
    wide = {n: t.double().nan_to_num() for n, t in given.items() if t.is_floating_point()}
    named = {name.removesuffix("_cache"): t for name, t in (given | wide).items()}
    y = layers.attend({"scale": given["q"].shape[3] ** -0.5}, **named)
    return y.transpose(1, 2).nan_to_num().numpy()  # a row that sees nothing is 0


def close(y: torch.Tensor, want: np.ndarray[Any, Any]) -> None:
    """One rounding of each weight and one of the result."""
    step = torch.finfo(y.dtype).eps
    assert np.max(np.abs(y.double().numpy() - want)) <= 2 * step * np.max(np.abs(want))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("shape", "traits"),
    [
        ((2, 4, 2, 64, 3, 70), {}),
        ((1, 8, 1, 32, 5, 600), {"sinks": True}),  # several parts
        ((1, 4, 2, 16, 4, 1100), {"window": 20, "sinks": True, "tree": True}),
        ((2, 4, 1, 80, 7, 300), {"tree": True}),  # a head of 80 numbers, and rows of two tiles
        ((1, 1, 1, 16, 40, 50), {"window": 9, "dtype": torch.float16}),
        ((1, 1, 1, 16, 40, 103), {"window": 1, "tree": True}),  # the anchor is in a step before
    ],
)
def test_attention_is_the_reference(shape: tuple[int, ...], traits: dict[str, Any]) -> None:
    given = drawn(*shape, **traits)
    close(launch.attention(**given), expected(given))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("size", "tile"), [(head, tile) for head in (64, 128, 200, 512) for tile in uses.attention_tiles(head)]
)
def test_every_tile_gives_the_same(size: int, tile: uses.AttentionTile) -> None:
    """A head of 200 numbers ends within a part of its columns."""
    given = drawn(1, 4, 1, size, 20, 90, window=50, sinks=True, tree=True)
    close(launch.attention(**given, tile=tile), expected(given))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("window", [None, 300])
def test_a_row_has_the_same_bits_in_a_pass_of_any_width(window: int | None) -> None:
    """Its keys are split where the cache is, and not where the pass begins or ends."""
    wide = drawn(1, 4, 2, 16, 8, 676, window=window)
    y = launch.attention(**wide)
    for at, count in ((0, 1), (7, 1), (0, 3), (2, 5), (3, 4)):
        part = {name: wide[name][:, at : at + count] for name in ("first", "last")}
        part["q"] = wide["q"][:, :, at : at + count].contiguous()
        assert torch.equal(launch.attention(**{**wide, **part}), y[:, :, at : at + count])


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("sink", [-1e30, 30.0, 1e30])
def test_a_sink_of_any_size(sink: float) -> None:
    given = drawn(1, 2, 1, 16, 2, 30, sinks=True)
    given["sinks"][:] = sink
    close(launch.attention(**given), expected(given))


@pytest.mark.usefixtures("few_programs")
def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays() -> None:
    given = drawn(1, 2, 2, 16, 3, 300)
    given["first"][0, 1] = given["last"][0, 1] + 1
    given["q"][0, 1, 2, 5] = float("nan")
    y = launch.attention(**given)
    assert torch.equal(y[0, :, 1], torch.zeros(2, 16))
    assert y[0, 1, 2].isnan().all()
    assert y.isnan().sum() == 16


def test_parts_fill_a_gpu_and_fit_their_memory() -> None:
    """The rows that a plugin declares at the largest shapes hold those of any shape."""
    assert uses.attention_parts(1, 8, 64) == 32
    assert uses.attention_parts(8, 8, 64) == 4
    assert uses.attention_parts(1, 8, 2048) == 1
    plugin = plugin_graph.PLUGINS["Attend_v3"]
    for kv_heads, group in ((8, 4), (2, 8), (1, 1)):
        for most_batch, most_count in ((1, 512), (8, 16), (16, 1)):

            def rows(batch: int, count: int, kv_heads: int = kv_heads, group: int = group) -> int:
                shapes = [(batch, kv_heads * group, count, 64), (batch, kv_heads, 999, 64)]
                symbols = plugin_table.Symbols(shapes, lambda a, b: -(-a // b), min)
                made = plugin.outputs(symbols, {"group": group})
                numbers = sum(int(np.prod(shape)) for shape, _ in made)
                assert 4 * numbers == uses.attention_bytes(batch, kv_heads, group * count, 64)
                return int(made[0][0][0])

            most = rows(most_batch, most_count)
            for batch in range(1, most_batch + 1):
                for count in {1, most_count // 2, most_count} - {0}:
                    parts = uses.attention_parts(batch, kv_heads, group * count)
                    assert parts * batch * kv_heads * group * count <= rows(batch, count) <= most


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("window", "sinks", "trees"),
    [(None, False, False), (12, True, False), (None, True, True), (12, False, True)],
)
def test_bodies_of_plugins_give_what_tensorrts_bodies_give(
    window: int | None, sinks: bool, trees: bool
) -> None:
    """Mask and attention together, written rows included. TensorRT's body computes in float32 here."""
    kind = AttentionKind(4, 2, 16, windowed=window is not None, sinks=sinks, trees=trees)
    given = drawn(2, 4, 2, 16, 5, 60, window=window, sinks=sinks, tree=trees)
    start = given.get("start", given["last"][:, 0])
    rows = {
        side: torch.stack([given[f"{side}_cache"][b, :, at : at + 5] for b, at in enumerate(start.tolist())])
        for side in "kv"
    }
    caches = {name: given[name].nan_to_num(3.0) for name in ("k_cache", "v_cache")}
    dialect = TensorRTPlugins(ir.DataType.BFLOAT16)
    passed = {**given, **rows, **caches, "start": start, "lengths": start + 5}
    if trees:
        passed["visible"] = given["visible"].bool()
    ranges = plugin_graph.run(dialect.attention_mask(kind), passed, {})
    named = dict(zip(("first", "last", "visible"), ranges, strict=False))
    y, *written = plugin_graph.run(dialect.attention(kind), passed | named, {})
    assert all(torch.equal(new, caches[name]) for new, name in zip(written, caches, strict=True))

    if sinks:  # the columns and the cache row of TensorRT's body
        caches = {name: torch.nn.functional.pad(cache, (0, 8, 0, 1)) for name, cache in caches.items()}
    feeds = plugin_graph.arrays({**passed, **caches})
    (want,) = _session(kind).run(None, {n: feeds[n] for n in _inputs(kind)})
    close(y, want)


def _inputs(kind: AttentionKind) -> dict[str, tuple[ir.DataType, list[str | int]]]:
    heads, kv_heads, size = kind.heads, kind.kv_heads, kind.head_dim
    wide = size + 8 * kind.sinks
    return {
        "q": (FLOAT, ["B", heads, "S", size]),
        **{side: (FLOAT, ["B", kv_heads, "S", size]) for side in "kv"},
        **{f"{side}_cache": (FLOAT, ["B", kv_heads, "C", wide]) for side in "kv"},
        **{name: (INT64, ["B"]) for name in ("start", "lengths")},
        **{name: (INT64, ["B", "S"]) for name in ("first", "last")},
        **({"visible": (BOOL, ["B", "S", "S"])} if kind.trees else {}),
        **({"sinks": (FLOAT, [heads])} if kind.sinks else {}),
    }


def _session(kind: AttentionKind) -> ort.InferenceSession:
    dialect = TensorRT(FLOAT, trt_operators=False)
    g = GraphBuilder("attention")
    v = {name: g.input(name, *declared) for name, declared in _inputs(kind).items()}
    inputs = [v["first"], v["last"], *([v["lengths"]] if kind.sinks else [])]
    inputs += [v["start"], v["visible"]] if kind.trees else []
    mask_body = dialect.attention_mask(kind)
    mask = g.call(mask_body, *inputs, g.dim(v["k_cache"], 2), outputs=2, name="mask", layer=0)
    inputs = [v[name] for name in ("q", "k", "v", "k_cache", "v_cache", "start")]
    y, *_ = g.call(
        *(dialect.attention(kind), *inputs, *mask, v["lengths"]),
        *([v["sinks"]] if kind.sinks else []),
        outputs=3,
        name="cached",
    )
    g.output(y, "y", FLOAT, ["B", kind.heads, "S", kind.head_dim])
    return session(executable(ir.to_proto(g.model())))
