"""The attention kernels in Triton's interpreter, against torch's operators and TensorRT's body in ONNX Runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from dflash_plugins import kernel_specs as uses
from dflash_plugins import layers as launch
from dflash_plugins.dialect import TensorRTPlugins
from dflash_plugins.kernel_table import ATTEND

from dflash_trt.engines.torch import layers
from dflash_trt.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.dialect import AttentionKind
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.graph.torch import Torch
from tests.doubles import plugin_graph
from tests.doubles.sessions import session
from tests.doubles.triton_interpreter import unrounded
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
    fp8: bool = False,
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
    if fp8:
        made |= {name: layers.in_bytes(made[name]) for name in ("k_cache", "v_cache")}
    if tree:
        made |= {"start": start, "visible": torch.from_numpy(visible)}
    if sinks:
        made["sinks"] = numbers(heads)
    return made


def expected(given: Tensors) -> np.ndarray[Any, Any]:
    given = {n: layers.from_bytes(t, torch.float32) for n, t in given.items()}
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
        ((2, 4, 2, 64, 3, 70), {"fp8": True, "dtype": torch.float16}),
        ((1, 8, 1, 80, 5, 400), {"fp8": True, "window": 20, "sinks": True, "tree": True}),
    ],
)
def test_attention_is_the_reference(shape: tuple[int, ...], traits: dict[str, Any]) -> None:
    given = drawn(*shape, **traits)
    close(launch.attention(**given), expected(given))


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("tree", [False, True])
def test_a_region_s_rows_have_the_same_bits_wherever_it_begins(tree: bool) -> None:
    """Among rows of other sequences, which hold NaN; and kinds of rows are placed there."""
    given = drawn(2, 4, 2, 32, 3, 300, sinks=True, tree=tree)
    named, begins = dict(given), torch.tensor([450, 37])
    for name in ("k_cache", "v_cache"):
        cache = torch.full((2, 800, 32), torch.nan, dtype=torch.bfloat16)
        for rows, begin in zip(given[name], begins.tolist(), strict=True):
            cache[:, begin : begin + 300] = rows
        named[name] = cache[None]
    y = launch.attention(**named, region=begins, most=300)
    assert torch.equal(y, launch.attention(**given))
    x, start = torch.randn(6, 8 * 32).bfloat16(), torch.tensor([5, 0])
    own = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    queries = launch.place_heads(x, 3, 32, 4, epsilon=0.0, start=start, **own)
    regions = {name: named[name] for name in own}
    placed = launch.place_heads(x, 3, 32, 4, epsilon=0.0, start=start, region=begins, **regions)
    assert torch.equal(queries, placed)
    for name, cache in own.items():
        for rows, begin, at in zip(cache, begins.tolist(), start.tolist(), strict=True):
            assert torch.equal(regions[name][0, :, begin + at : begin + at + 3], rows[:, at : at + 3])
        assert regions[name].isnan().sum() >= 2 * 200 * 32, "no other row is written"


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("size", "tile"), [(head, tile) for head in (64, 200, 512) for tile in uses.attention_tiles(head)]
)
def test_every_tile_gives_the_same(size: int, tile: uses.AttentionTile) -> None:
    """A head of 200 numbers ends within a part of its columns."""
    given = drawn(1, 2, 1, size, 10, 70, window=40, sinks=True, tree=True, fp8=tile.columns > 0)
    close(launch.attention(**given, tile=tile), expected(given))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64, 64, 128, 128, 256, 256, 512 slots and a last one without end."""
    for name, value in (("PART", 64), ("ALIKE", 2), ("PARTS", 8), ("PROGRAMS", 2), ("AHEAD", 2)):
        monkeypatch.setattr(uses, f"ATTENTION_{name}", value)


def splits(given: Tensors) -> int:
    (batch, heads, count, size), (kv_heads, capacity) = given["q"].shape, given["k_cache"].shape[1:3]
    return int(uses.AttentionSplits(batch, kv_heads, heads // kv_heads * count, capacity, size).splits)


def of(given: Tensors, sequence: int, rows: slice = slice(None)) -> Tensors:
    """Some rows of one sequence of a pass."""
    cut = {name: tensor[sequence : sequence + 1] for name, tensor in given.items() if name != "sinks"}
    cut |= {name: cut[name][:, rows] for name in ("first", "last")}
    cut["q"] = cut["q"][:, :, rows]
    if "visible" in cut:
        cut["visible"] = cut["visible"][:, rows, rows]
    return {name: tensor.contiguous() for name, tensor in cut.items()} | {
        name: given[name] for name in given.keys() & {"sinks"}
    }


KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "qwen3": ((2, 8, 2, 128, 3, 260), {}),
    "many rows of one key head": ((3, 2, 1, 32, 33, 300), {"dtype": torch.float16}),
    "gpt-oss": ((2, 16, 2, 64, 3, 350), {"sinks": True, "window": 128}),
    "gemma 4": ((3, 4, 1, 512, 2, 200), {}),
    "gemma 4, window": ((2, 4, 2, 256, 2, 270), {"window": 100}),
    "qwen3, fp8": ((2, 8, 2, 128, 3, 260), {"fp8": True}),
}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str) -> None:
    """Others of its pass, and other sequences. Parts have programs of their own, or one program takes all."""
    shape, traits = KINDS[kind]
    given = drawn(*shape, **traits)
    together, ways = unrounded(launch.attention, **given), {splits(given)}
    for b, rows in ((0, slice(0, 1)), (shape[0] - 1, slice(1, 2))):
        part = of(given, b, rows)
        assert torch.equal(unrounded(launch.attention, **part), together[b : b + 1, :, rows])
        ways.add(splits(part))
    assert 1 in ways
    assert max(ways) > 2


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("window", [None, 90])
def test_a_tree_has_the_same_bits_with_more_nodes_and_beside_others(window: int | None) -> None:
    given = drawn(2, 4, 2, 32, 5, 200, window=window, sinks=True, tree=True)
    together, few = unrounded(launch.attention, **given), of(given, 0, slice(0, 3))
    assert torch.equal(unrounded(launch.attention, **few), together[:1, :, :3])
    assert splits(given) < splits(few)


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_moved_down_by_whole_strides_change_no_bit(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in layers with a window (docs/graphs.md). Parts have programs of their own, or one program takes all."""
    monkeypatch.setattr(uses, "ATTENTION_PROGRAMS", 2)
    stride = uses.ATTENTION_PART
    assert Torch.window_stride(64) % stride == TensorRT.window_stride(64) % stride == 0
    given = drawn(batch, 2, 1, 16, 3, 3 * stride + 20, window=stride)
    given["last"] = (2 * stride + 15 + torch.arange(3)).repeat(batch, 1)
    given["first"] = given["last"] - (stride - 1)
    caches = {name: torch.randn(given[name].shape).bfloat16() for name in ("k_cache", "v_cache")}
    moved = {name: cache[:, :, stride:].contiguous() for name, cache in caches.items()}
    rows = {name: given[name] - stride for name in ("first", "last")}
    assert torch.equal(
        unrounded(launch.attention, **given | caches), unrounded(launch.attention, **given | moved | rows)
    )


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("batch", [1, 3])
def test_rows_of_a_window_that_is_longer_than_equal_parts_may_move_down(batch: int) -> None:
    """In a cache without a window, later parts are longer, and begin at other rows of the sequence after a move."""
    given, moved, low = drawn(batch, 2, 1, 16, 3, 400, window=300), dict[str, torch.Tensor](), 64
    given["last"] = (390 + torch.arange(3)).repeat(batch, 1)
    given["first"] = given["last"] - 299
    for name in ("k_cache", "v_cache"):
        given[name] = torch.randn(given[name].shape).bfloat16()
        moved[name] = torch.cat((given[name][:, :, low:], given[name][:, :, :low]), 2)
    moved |= {name: given[name] - low for name in ("first", "last")}
    here, there = (unrounded(launch.attention, **given | other, windowed=True) for other in ({}, moved))
    assert torch.equal(here, there)
    assert not torch.equal(*(unrounded(launch.attention, **given | other) for other in ({}, moved)))
    body = TensorRTPlugins(ir.DataType.BFLOAT16).attention(AttentionKind(2, 1, 16, windowed=True))
    for other in ({}, moved):
        feeds = given | other
        feeds["start"] = feeds["last"][:, 0]
        begin = int(feeds["start"][0])
        feeds |= {side: feeds[f"{side}_cache"][:, :, begin : begin + 3] for side in "kv"}
        assert torch.equal(plugin_graph.run(body, feeds, {})[0], here.to(torch.bfloat16))


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


def test_parts_cover_a_cache_fill_a_gpu_and_fit_their_memory() -> None:
    """The rows that a plugin declares at the largest shapes hold those of any shape."""
    ends = [uses.AttentionSplits(1, 1, 1, slots, 64).parts for slots in range(1, 13_000)]
    sizes = np.bincount(ends)[1:].tolist()
    assert sizes[:-1] == [128] * 32 + [256] * 32 + [512]
    assert uses.AttentionSplits(1, 1, 1, 10**8, 64).parts == uses.ATTENTION_PARTS
    alike = [uses.AttentionSplits(1, 1, 1, slots, 64, windowed=True).parts for slots in (128 * 200, 10**8)]
    assert alike == [200, uses.ATTENTION_PARTS]

    heads, passes = ((8, 4), (2, 8), (1, 1)), ((1, 512), (8, 16), (16, 1))
    shapes = itertools.product(heads, passes, ((64, 4096), (512, 40_000)), (False, True))
    for (kv_heads, group), (most_batch, most_count), (size, capacity), windowed in shapes:

        def rows(
            batch: int,
            count: int,
            cache: tuple[int, ...] = (kv_heads, capacity, size),
            group: int = group,
            *,
            windowed: bool = windowed,
        ) -> tuple[int, int]:
            shapes = [(batch, cache[0] * group, count, cache[2]), (batch, *cache)]
            given = ATTEND.sizes(shapes), ATTEND.given({"group": group, "windowed": int(windowed)})
            made = ATTEND.outputs(*given)
            numbers = sum(int(np.prod(shape)) for shape, _ in made.values())
            asked = batch, cache[0], group * count, cache[2], cache[1]
            assert 4 * numbers == uses.attention_bytes(*asked, windowed=windowed)
            return int(made["partial"][0][0]), ATTEND.integers(*given)["splits"]

        most, _ = rows(most_batch, most_count)
        whole = uses.AttentionSplits(1, 1, 1, capacity, size, windowed=windowed).parts
        for batch in range(1, most_batch + 1):
            for count in {1, most_count // 2, most_count} - {0}:
                declared, parts = rows(batch, count)
                assert parts * batch * kv_heads * group * count <= declared <= most
                programs = batch * kv_heads * -(-group * count // uses.ATTENTION_ROWS)
                assert (parts == 1) == (programs > 64 or programs * whole * size > 2**20)


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
