"""The cache pool against one plain array per slot: rows are where they belong, whatever moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt.engines.onnxruntime.caches import STEP, CachePool
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from dflash_trt.errors import BundleError
from dflash_trt.graph.builder import FLOAT, GraphBuilder

SLOTS, CAPACITY, WIDTHS = 4, 500, {"k_cache.0": (3, np.float32), "v_cache.0": (2, np.float32)}


class Model:
    """A pool, and what each slot's rows must be."""

    def __init__(self, seed: int) -> None:
        self.pool = CachePool(WIDTHS, SLOTS, CAPACITY)
        self.rows = [np.zeros((0, 3), np.float32) for _ in range(SLOTS)]
        self.rng = np.random.default_rng(seed)

    def write(self, first: int, starts: list[int], count: int) -> int:
        """A pass: rows start .. start+count-1 of each slot become new ones. Returns the rows of the view."""
        begin, rows = self.pool.place(first, [start + count for start in starts])
        assert rows >= max(starts) + count
        new = self.rng.normal(size=(len(starts), count, 3)).astype(np.float32)
        for _name, view in self.pool.views(begin, len(starts), rows):
            assert np.isfinite(view).all()
            for i, start in enumerate(starts):
                view[i, start : start + count] = new[i, :, : view.shape[2]]
        for i, start in enumerate(starts):
            self.rows[first + i] = np.concatenate([self.rows[first + i][:start], new[i]])
        self.check()
        return rows

    def check(self) -> None:
        for slot, rows in enumerate(self.rows):
            for found in self.pool.read(slot, 0, len(rows)):
                np.testing.assert_array_equal(found, rows[:, : found.shape[1]])


@pytest.mark.parametrize("seed", range(20))
def test_rows_stay_with_their_slot(seed: int) -> None:
    """Passes over any slots, of any lengths, moves, and rows put back, in any order."""
    model = Model(seed)
    rng = np.random.default_rng(1000 + seed)
    for _ in range(60):
        first = int(rng.integers(SLOTS))
        n = int(rng.integers(1, SLOTS - first + 1))
        what = rng.choice(["pass", "restart", "move", "put back", "clear"], p=[0.6, 0.1, 0.1, 0.1, 0.1])
        length = len(model.rows[first])
        if what == "pass":
            starts = [
                int(rng.integers(max(0, len(r) - 4), len(r) + 1)) for r in model.rows[first : first + n]
            ]
            count = int(rng.integers(1, 90))
            if max(starts) + count <= CAPACITY:
                model.write(first, starts, count)
        elif what == "restart":
            model.write(first, [0], int(rng.integers(1, 200)))
        elif what == "move":
            other, kept = int(rng.integers(SLOTS)), int(rng.integers(length + 1))
            if other != first:
                model.pool.copy(first, other, kept)
                model.rows[other] = model.rows[first][:kept].copy()
        elif what == "put back" and length:
            start = int(rng.integers(length))
            kept_rows = [rows.copy() for rows in model.pool.read(first, start, length)]
            model.pool.write(kept_rows, first, start)
        elif what == "clear":
            start = int(rng.integers(length + 1))
            model.pool.clear(first, start, None)
            model.rows[first] = model.rows[first][:start]
        model.check()


def test_numbers_that_are_not_finite_stay_nowhere() -> None:
    """A slot moves while it holds NaN and is cleared after: no pass sees one again, wherever it looks."""
    pool = CachePool(WIDTHS, SLOTS, CAPACITY)
    begin, rows = pool.place(1, [400])
    for _, view in pool.views(begin, 1, rows):
        view[0, :400] = np.nan
    for ends in ([70] * 4, [10, 130, 10], [500, 500, 500, 500], [20, 20]):
        pool.place(0, ends)
    pool.clear(1, 0, None)
    assert all(np.isfinite(memory).all() for memory in pool.arrays.values())


def test_a_slot_alone_does_not_move() -> None:
    """However long it grows, and while the others are packed. A slot has whole steps of rows."""
    pool = CachePool(WIDTHS, SLOTS, CAPACITY)
    assert [pool.place(3, [n]) for n in (1, 129, 499)] == [(1536, STEP), (1536, 2 * STEP), (1536, 512)]
    assert pool.place(0, [100, 30]) == (0, 128)
    assert pool.place(0, [90, 100]) == (0, 128)
    assert pool.place(1, [64]) == (128, 128)
    assert pool.place(3, [499]) == (1536, 512)
    assert pool.place(1, [129]) == (512, 256)  # more than its share: it goes back
    with pytest.raises(ValueError, match=r"slots 3\.\.4 of 4"):
        pool.place(3, [1, 1])


def test_a_graph_with_caches_by_head_is_refused(tmp_path: Path) -> None:
    g = GraphBuilder("target")
    cache = g.input("k_cache.0", FLOAT, ["B", 2, "C", 16])
    g.output(g.op("Identity", cache), "k_cache_out.0", FLOAT, ["B", 2, "C", 16])
    ir.save(g.model(), tmp_path / "target.onnx")
    with pytest.raises(BundleError, match=r"k_cache\.0 has 4 axes, expected 3: .* build it again"):
        OnnxRuntimeEngine(tmp_path / "target.onnx", slots=1, capacity=64)
