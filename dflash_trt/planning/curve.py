"""Throughput per GPU against tokens per second and user: plain decoding and drafts, over batches and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dflash_trt.planning.acceptance import Acceptance, Chain

PLAIN, CHAIN = "plain", "EAGLE-3"


class Layout(Protocol):
    """The times of one layout: `gpus` GPUs that share a model. `most`: the largest batch.

    Each method gives seconds, or None where the source of the times has none.
    """

    @property
    def gpus(self) -> int: ...
    @property
    def most(self) -> int: ...

    def plain(self, batch: int) -> float | None:
        """A step of plain decoding: one token for each request."""

    def round(self, batch: int, block: int) -> float | None:
        """A round with a block of this many rows for each request."""

    def chain(self, batch: int, chain: Chain) -> float | None:
        """A round of EAGLE-3: its one layer runs `steps` times, then the target verifies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting: `batch` requests at a time on each group of `gpus` GPUs that share a model.

    speed: tokens per second of one user. throughput: tokens per second of one GPU.
    """

    method: str
    gpus: int
    batch: int
    speed: float
    throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All points by method: "plain", "block 8" and so on, and "EAGLE-3" where its acceptance is known.

    place: the GPU, or the machine. unit: what a layout counts, "GPU" or "machine". times: the source of the times.
    """

    target: str
    place: str
    unit: str
    times: str
    context: int
    acceptance: Acceptance
    chain: Chain | None
    points: Mapping[str, tuple[Point, ...]]

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(name for name in self.points if name not in (PLAIN, CHAIN))

    def fastest(self, method: str) -> Point:
        """The point with the most tokens per second and user."""
        return max(self.points[method], key=lambda point: point.speed)

    @property
    def top_speed(self) -> float:
        """The top speed of plain decoding, or of drafts where plain decoding was not measured."""
        methods = (PLAIN,) if PLAIN in self.points else self.blocks
        return max(self.fastest(method).speed for method in methods)

    def best(self, method: str, speed: float) -> Point | None:
        """The point with the highest throughput per GPU among those with at least this speed per user."""
        enough = [point for point in self.points.get(method, ()) if point.speed >= speed]
        return max(enough, key=lambda point: point.throughput, default=None)

    def best_block(self, speed: float) -> Point | None:
        """As best, over all block lengths."""
        found = [point for name in self.blocks if (point := self.best(name, speed)) is not None]
        return max(found, key=lambda point: point.throughput, default=None)

    def frontier(self, method: str) -> list[Point]:
        """The points that no other point of the method beats in both figures, from slow to fast."""
        kept: list[Point] = []
        for point in sorted(self.points[method], key=lambda p: (-p.speed, -p.throughput)):
            if not kept or point.throughput > kept[-1].throughput:
                kept.append(point)
        return kept[::-1]

    def same_batch(self, block: str, batch: int) -> float | None:
        """The speedup of a block length at the same batch, each with its best layout."""
        both = [
            max((p.speed for p in self.points.get(name, ()) if p.batch == batch), default=None)
            for name in (PLAIN, block)
        ]
        return None if both[0] is None or both[1] is None else both[1] / both[0]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compute_curves(
    layouts: Sequence[Layout],
    acceptance: Acceptance,
    *,
    name: str,
    place: str,
    times: str,
    unit: str = "GPU",
    context: int,
    blocks: Sequence[int],
    chain: Chain | None = None,
) -> Curves:
    """Points of every layout, with batches up to its largest."""
    made: dict[str, list[Point]] = {}
    for layout in layouts:
        for batch in batches(layout.most):
            found = {PLAIN: (1.0, layout.plain(batch))}
            for block in blocks:
                found[f"block {block}"] = acceptance.length(block), layout.round(batch, block)
            if chain is not None:
                found[CHAIN] = chain.length, layout.chain(batch, chain)
            for method, (tokens, seconds) in found.items():
                if seconds is not None:
                    point = _point(method, layout.gpus, batch, tokens, seconds)
                    made.setdefault(method, []).append(point)
    return Curves(
        target=name,
        place=place,
        unit=unit,
        times=times,
        context=context,
        acceptance=acceptance,
        chain=chain if CHAIN in made else None,
        points={method: tuple(points) for method, points in made.items() if points},
    )


def batches(limit: int) -> list[int]:
    """1 to 16, then in steps of an eighth, up to the limit."""
    found: list[int] = []
    batch = 1
    while batch <= limit:
        found.append(batch)
        batch += max(1, batch // 8)
    return found


def _point(method: str, gpus: int, batch: int, tokens: float, seconds: float) -> Point:
    return Point(
        method=method,
        gpus=gpus,
        batch=batch,
        speed=tokens / seconds,
        throughput=batch * tokens / seconds / gpus,
    )
