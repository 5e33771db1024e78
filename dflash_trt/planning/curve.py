"""Throughput per GPU against tokens per second and user: plain decoding and drafts, over batches and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_trt.errors import BuildError
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Acceptance, Chain
from dflash_trt.planning.gpus import Gpu
from dflash_trt.planning.inventory import Inventory
from dflash_trt.planning.memory import Settings, estimate_memory
from dflash_trt.planning.work import Work, work_of

PLAIN, CHAIN = "plain", "EAGLE-3"
_MAX_BATCH = 512
_CHAIN_VOCABULARY = 32_000  # of the drafts of published EAGLE-3 heads


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
    """All points by method: "plain", "block 8" and so on, and "EAGLE-3" where its acceptance is known."""

    target: str
    gpu: str
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

    def best(self, method: str, speed: float) -> Point | None:
        """The point with the highest throughput per GPU among those with at least this speed per user."""
        enough = [point for point in self.points[method] if point.speed >= speed]
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
            max((p.speed for p in self.points[name] if p.batch == batch), default=None)
            for name in (PLAIN, block)
        ]
        return None if both[0] is None or both[1] is None else both[1] / both[0]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compute_curves(
    inventory: Inventory,
    settings: Settings,
    acceptance: Acceptance,
    *,
    name: str,
    context: int,
    blocks: Sequence[int],
    chain: Chain | None = None,
    constants: times.Constants | None = None,
) -> Curves:
    """Points of every layout that fits on one node of `settings.gpu`, with batches up to what the memory holds.

    A layout is 1, 2, 4, ... GPUs that share a model, repeated over the node. Experts take the same bytes whether they
    are split or spread. `context`: rows of cache behind each request.

    Raises BuildError if no layout fits.
    """
    constants = constants or times.built_in()
    gpu, traits = settings.gpu, settings.traits
    made: dict[str, list[Point]] = {PLAIN: [], **{f"block {block}": [] for block in blocks}}
    if chain is not None:
        made[CHAIN] = []
    count = 1
    while count <= (gpu.gpus_per_node if traits.several_gpus else 1):
        layout = replace(settings, tensor_parallel=count, max_seq_len=context, max_batch_size=1)
        fits = estimate_memory(inventory, layout).largest_batch
        target = work_of(inventory, "target", gpu, gpus=count, precision=settings.precision)
        drafter = work_of(inventory, "drafter", gpu, gpus=count, precision=settings.precision)
        for batch in _batches(min(fits, _MAX_BATCH)):
            plain = times.plain_seconds(target, gpu, constants, requests=batch, context=context)
            made[PLAIN].append(_point(PLAIN, count, batch, 1.0, plain))
            for block in blocks:
                seconds = times.round_seconds(
                    target, drafter, gpu, constants, requests=batch, width=block, context=context
                )
                method = f"block {block}"
                made[method].append(_point(method, count, batch, acceptance.length(block), seconds))
            if chain is not None:
                seconds = _chain_seconds(inventory, target, gpu, constants, chain, batch, context)
                made[CHAIN].append(_point(CHAIN, count, batch, chain.length, seconds))
        count *= 2
    if not made[PLAIN]:
        raise BuildError(
            f"{name} fits on no layout of one node of {gpu.name} with {context} tokens of context: lower --context, "
            "or choose GPUs with more memory"
        )
    return Curves(
        target=name,
        gpu=gpu.name,
        context=context,
        acceptance=acceptance,
        chain=chain,
        points={method: tuple(points) for method, points in made.items()},
    )


def _batches(limit: int) -> list[int]:
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


def _chain_seconds(
    inventory: Inventory,
    target: Work,
    gpu: Gpu,
    constants: times.Constants,
    chain: Chain,
    batch: int,
    context: int,
) -> float:
    """A round of EAGLE-3: its one layer runs `steps` times, one row per request, then the target verifies."""
    c = inventory.target
    attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads)
    attention += c.hidden_size * c.head_dim * c.num_attention_heads
    size = attention + 3 * c.hidden_size * (c.intermediate_size + c.hidden_size)
    size += _CHAIN_VOCABULARY * c.hidden_size
    layer = Work(
        layers=1,
        dense_bytes=2 * size / target.gpus,
        dense_operations=2 * size / target.gpus,
        dense_rate=gpu.dense_flops["bf16"],
        expert_bytes=0.0,
        expert_operations=0.0,
        expert_rate=1.0,
        experts=0,
        experts_per_token=0,
        kv_bytes=4 * c.num_key_value_heads * c.head_dim / target.gpus,
        window_bytes=0.0,
        window=0,
        hidden_bytes=2 * c.hidden_size,
        gpus=target.gpus,
    )
    step = times.pass_seconds(layer, gpu, constants, requests=batch, width=1, context=context)
    verify = times.pass_seconds(
        target, gpu, constants, requests=batch, width=chain.steps + 1, context=context
    )
    return verify + chain.steps * step + constants.round_seconds + constants.request_seconds * batch
