"""Layers with a window keep its rows only, and every number is that of caches with all rows, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.cache_kinds import CacheKind, rows_by_window
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.draft import tree_rows
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.text_checkpoints import make_gemma

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, SLOTS, BLOCK, LONGEST = 40, 3, 8, 40
WINDOWED = {"sliding_window": WINDOW, "layer_types": (SLIDING, FULL), "head_dim": 128}
PAIRS: dict[str, tuple[Any, Any, int]] = {
    "causal": (partial(make_target, layers=2, **WINDOWED), partial(make_drafter, **WINDOWED), 1),
    "both directions": (
        partial(make_target, layers=2, **WINDOWED),
        partial(make_drafter, is_causal=False, **WINDOWED | {"layer_types": (SLIDING, SLIDING)}),
        1,
    ),
    "sinks": (
        partial(make_gpt_oss, head_dim=64, sliding_window=WINDOW, num_hidden_layers=2),
        partial(make_gpt_oss_drafter, layers=1),
        1,
    ),
    "heads of two kinds": (
        partial(make_gemma, head_dim=128, num_hidden_layers=2, sliding_window=WINDOW),
        partial(make_drafter, layers=1),
        1,
    ),
    "trees and sinks": (
        partial(make_gpt_oss, head_dim=64, sliding_window=WINDOW, num_hidden_layers=2),
        partial(make_gpt_oss_drafter, layers=1),
        3,
    ),
}


@pytest.mark.parametrize("window", [1, 2, 5, 8, 20])
def test_a_cut_goes_as_far_as_the_rows_that_its_window_sees(window: int) -> None:
    kind = CacheKind(window=window, stride=8, rows=99, row_bytes=4, layers=(0,))
    for first in range(60):
        lengths = [n for n in range(1, 100) if max(0, n - window + 1) >= first]  # a row sees itself
        assert kind.shortest(first) == lengths[0]
        assert kind.first(lengths[0]) >= first
        assert kind.base(first) == max(0, first - window + 1) // 8 * 8


@pytest.mark.parametrize("stride", [1, 8, 128])
@pytest.mark.parametrize("window", [1, 20, 128])
def test_a_pass_has_room_wherever_it_begins(window: int, stride: int) -> None:
    """And no more than it needs at the worst place."""
    rows = rows_by_window([window], stride, 10_000, 33)[window]
    kind = CacheKind(window=window, stride=stride, rows=rows, row_bytes=4, layers=(0,))
    assert max(start + 33 - kind.base(start) for start in range(1000)) == rows


@pytest.fixture(scope="module", params=PAIRS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    directory, (target, drafter, width) = tmp_path_factory.mktemp("windows"), PAIRS[request.param]
    target(directory / "target", max_position_embeddings=4096)
    drafter(directory / "drafter", directory / "target", block_size=BLOCK, taps=(0, 1))
    sources = str(directory / "target"), str(directory / "drafter")
    return build(*sources, directory / "bundle", max_seq_len=3000, tree_width=width)


def engine(bundle: Bundle, role: str, kinds: tuple[CacheKind, ...] = ()) -> OnnxRuntimeRunner:
    path = bundle.path / f"{role}.onnx"
    return OnnxRuntimeRunner(path, slots=SLOTS, capacity=bundle.capacity, kinds=kinds, threads=1)


def target_feeds(rng: np.random.Generator, starts: list[int], count: int, *, trees: bool) -> dict[str, Any]:
    n = len(starts)
    feeds = {
        "tokens": rng.integers(0, VOCAB, (n, count)),
        "start": np.array(starts),
        "rows": np.tile(np.arange(count), (n, 1)),
    }
    if trees:
        parents = np.stack([[max(0, i - 1 - int(rng.integers(3))) for i in range(count)] for _ in starts])
        feeds |= tree_rows(parents)
    return feeds


def drafter_feeds(rng: np.random.Generator, starts: list[int], count: int, size: int) -> dict[str, Any]:
    n = len(starts)
    return {
        "features": rng.standard_normal((n, count, size)).astype(np.float32),
        "n_features": rng.integers(0, count + 1, n),
        "start": np.array(starts),
        "block": rng.integers(0, VOCAB, (n, BLOCK)),
    }


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_every_number_is_that_of_caches_with_all_rows(bundle: Bundle, role: str) -> None:
    """Passes of any length over any slots, after any of which any rows may be taken back, two capacities long."""
    kinds = bundle.cache_kinds(role)
    if all(kind.window is None for kind in kinds):
        pytest.skip("no layer has a window")
    windowed, whole = engine(bundle, role, kinds), engine(bundle, role)
    rng, lengths = np.random.default_rng(5), [0] * SLOTS
    stride = next(kind.stride for kind in kinds if kind.window is not None)
    size = len(bundle.manifest["target_layer_ids"]) * bundle.manifest["hidden_size"]
    aim = 2 * (WINDOW - 1 + stride - 1 + LONGEST)
    assert aim < bundle.manifest["max_seq_len"]
    while min(lengths) < aim:
        first = int(rng.integers(SLOTS))
        slots = range(first, int(rng.integers(first, SLOTS)) + 1)
        starts, count = [lengths[slot] for slot in slots], int(rng.integers(1, LONGEST))
        if max(starts) + count + BLOCK > bundle.manifest["max_seq_len"]:
            continue
        if role == "target":
            feeds = target_feeds(rng, starts, count, trees=bundle.manifest["tree_width"] > 1)
            taken = rng.integers(0, count + 1, len(starts))
        else:
            feeds = drafter_feeds(rng, starts, count, size)
            taken = feeds["n_features"]
        expected = whole.run(feeds, first_slot=first)
        found = windowed.run(feeds, first_slot=first)
        for name, numbers in expected.items():
            np.testing.assert_array_equal(found[name], numbers, err_msg=f"{name} at {starts}, {count} rows")
        for slot, n in zip(slots, taken.tolist(), strict=True):
            lengths[slot] += n
    for each in windowed.caches.kinds:
        used = max(held.finite for held in each.records)
        assert (max(held.base for held in each.records) > 0) == (each.kind.window is not None)
        assert used <= (
            WINDOW - 1 + stride - 1 + LONGEST + BLOCK + 64 if each.kind.window else max(lengths) + 200
        )
