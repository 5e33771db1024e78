"""Rows of every slot against plain lists: they are where they belong, and nothing that is not finite outlives its
sequence, whatever comes in between.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.onnxruntime.caches import HostCaches

SLOTS, CAPACITY, MOST = 4, 500, 60
WIDTHS = {"k_cache.0": (97, np.float32), "v_cache.0": (2, np.float32), "k_cache.1": (1, np.float32)}


def kinds(window: int, stride: int) -> list[CacheKind]:
    rows = window - 1 + stride - 1 + MOST + 1
    return [
        CacheKind(window=None, stride=1, rows=CAPACITY, row_bytes=4, layers=(1,)),
        CacheKind(window=window, stride=stride, rows=rows, row_bytes=20, layers=(0,)),
    ]


class Model:
    """Caches, and by slot the numbers of its sequence; `shortest`: the least length to which it can be cut."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kinds = kinds(int(self.rng.integers(2, 50)), int(self.rng.choice([1, 8, 64, 128])))
        self.caches = HostCaches(self.kinds, SLOTS, CAPACITY)
        self.caches.allocate(WIDTHS)
        self.rows: list[list[float]] = [[] for _ in range(SLOTS)]
        self.kept: list[tuple[list[float], list[Any]]] = []  # tokens, and adjacent copies of them

    def spoilt(self, slot: int) -> bool:
        return bool(np.isnan(self.rows[slot]).any())

    def lengths(self, slot: int) -> list[int]:
        """Those that others may get: none of a sequence with NaN."""
        length = len(self.rows[slot])
        return list(self.caches.cut_lengths(slot, length)) if length and not self.spoilt(slot) else []

    def cut(self, slot: int) -> None:
        if lengths := self.lengths(slot):
            self.rows[slot] = self.rows[slot][: self.rng.choice([0, *lengths])]

    def run(self, first: int, count: int, nan: float) -> None:
        """A pass that writes `count` rows in some slots from `first` on, of which each sequence takes some."""
        slots = range(first, int(self.rng.integers(first, SLOTS)) + 1)
        starts = [len(self.rows[slot]) for slot in slots]
        if max(starts) + count >= CAPACITY:
            return
        places = self.caches.prepare(first, starts, count + 1)
        bases = self.caches.bases(starts)
        new = self.rng.normal(size=(len(slots), count))
        new[self.rng.random(new.shape) < nan] = np.nan
        for name, view in self.caches.views(places, len(slots)):
            for i, start in enumerate(starts):
                base = 0 if name.endswith("1") else bases[self.kinds[1].input][i]
                view[i, start - base : start - base + count] = new[i, :, None]
                view[i, start - base + count] = 1  # a sink
        for slot, numbers in zip(slots, new, strict=True):
            taken = int(self.rng.integers(count + 1))
            self.rows[slot] += numbers[:taken].tolist()
            if np.isnan(numbers).any():  # as decoding does for a sequence, and for its drafts
                if self.spoilt(slot):
                    if self.rng.random() < 0.5:  # else it is found later
                        self.clear(slot, 0)
                else:
                    self.clear(slot, len(self.rows[slot]))

    def clear(self, slot: int, first: int) -> None:
        self.caches.clear(slot, first)
        self.rows[slot] = self.rows[slot][:first]

    def copy(self, source: int, target: int) -> None:
        if source != target and not self.spoilt(target) and (lengths := self.lengths(source)):
            length = int(self.rng.choice(lengths))
            self.caches.copy(source, target, length)
            self.rows[target] = self.rows[source][:length]

    def keep(self, slot: int) -> None:
        if not (lengths := self.lengths(slot)):
            return
        stop = max(lengths)
        cuts = [0, *sorted(set(self.rng.integers(1, stop, 2).tolist())), stop] if stop > 1 else [0, stop]
        shortest = int(self.rng.integers(cuts[-2], stop)) + 1
        copies = [self.caches.keep(slot, *part, shortest) for part in pairwise(cuts)]
        self.kept.append((self.rows[slot][:stop], copies))

    def renew(self, slot: int) -> None:
        """Copies of a slot's beginning are taken anew, where that gives what they lack."""
        if not self.lengths(slot):
            return
        shortest = int(self.rng.integers(len(self.rows[slot]))) + 1
        for tokens, copies in self.kept:
            for i, copy in enumerate(copies):
                if shortest <= copy.start or self.rows[slot][: copy.stop] != tokens[: copy.stop]:
                    break
                if self.caches.lacks(slot, copy, shortest):
                    copies[i] = self.caches.keep(slot, copy.start, copy.stop, shortest)

    def restore(self, slot: int) -> None:
        if not self.kept or self.spoilt(slot):
            return
        tokens, copies = self.kept[self.rng.integers(len(self.kept))]
        ends = [each for each in copies if len(each.lengths)]
        if not ends:
            return
        last = ends[self.rng.integers(len(ends))]
        length = int(self.rng.choice(last.lengths))
        self.caches.restore(slot, copies[: copies.index(last) + 1], length)
        self.rows[slot] = tokens[:length]

    def check(self) -> None:
        """A sequence has the rows that its next pass sees, and outside of sequences with NaN all rows are finite."""
        for slot, numbers in enumerate(self.rows):
            first = self.kinds[1].first(len(numbers))
            for name, rows in self.caches.read(slot, 0, len(numbers)).items():
                seen = numbers if name.endswith("1") else numbers[first:]
                np.testing.assert_array_equal(rows, np.tile(seen, (rows.shape[1], 1)).T.astype(np.float32))
        for each in self.caches.kinds:
            for memory in each.pool.arrays.values():
                bad = ~np.isfinite(memory).all(axis=1)
                for slot, record in enumerate(each.records):
                    begin = each.pool._begin(slot)
                    if self.spoilt(slot):
                        bad[begin : begin + record.finite] = False
                assert not bad.any()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_everything(seed: int) -> None:
    model = Model(seed)
    rng = np.random.default_rng(1000 + seed)
    chances = {
        "pass": 0.4,
        "cut": 0.1,
        "copy": 0.1,
        "keep": 0.1,
        "restore": 0.1,
        "renew": 0.1,
        "end": 0.05,
        "clear": 0.05,
    }
    for _ in range(160):
        slot = int(rng.integers(SLOTS))
        match str(rng.choice(list(chances), p=list(chances.values()))):
            case "pass":
                model.run(slot, int(rng.integers(1, MOST)), float(rng.choice([0, 0, 0.02])))
            case "cut":
                model.cut(slot)
            case "copy":
                model.copy(slot, int(rng.integers(SLOTS)))
            case "keep":
                model.keep(slot)
            case "renew":
                model.renew(slot)
            case "restore":
                model.restore(slot)
            case "end":
                model.clear(slot, 0)
            case "clear":
                model.clear(slot, len(model.rows[slot]))
        model.check()
