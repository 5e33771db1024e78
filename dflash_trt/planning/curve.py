"""Tokens per second of one user, and of one GPU, over the requests at a time: plain decoding and drafts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_trt.engines import registry
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.models.inventory import Inventory
from dflash_trt.planning import times
from dflash_trt.planning.acceptance import Acceptance
from dflash_trt.planning.memory import estimate_memory
from dflash_trt.planning.settings import Settings
from dflash_trt.planning.work import work_of

PLAIN = "plain"
# The most requests, the tokens of each, and the formats of the weights in the published tables.
MOST_REQUESTS, USUAL_CONTEXT = 32, 1000
_FORMATS = frozenset({"bf16", "mxfp4"})
_MEASURE = "measure on the machine itself with `dflash-trt bench`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`batch` requests at a time. speed: tokens per second of one of them. throughput: of all."""

    method: str
    batch: int
    speed: float
    throughput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All points by method: "plain", "block 8" and so on. Every method has the same batches, in rising order.

    times: the source of the times. context: rows of cache of each request.
    """

    target: str
    gpu: str
    times: str
    context: int
    acceptance: Acceptance
    points: Mapping[str, tuple[Point, ...]]

    @property
    def blocks(self) -> tuple[str, ...]:
        """The methods that draft."""
        return tuple(name for name in self.points if name != PLAIN)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON has it."""
        return asdict(self)


def check_confirmed(inventory: Inventory, settings: Settings, formats: Collection[str]) -> None:
    """Raise UsageError for a pair or a GPU on which the times were not confirmed by published tables.

    `formats`: those of the weights.
    """
    gpu, target, drafter = settings.gpu.name, inventory.target, inventory.drafter
    if gpu != times.GPU:
        raise UsageError(
            f"--gpu {gpu}: --curve has times for {times.GPU} only, where they agree with published tables; on H200 and "
            f"B300 they were 20 to 59% off, and no other GPU was compared: {_MEASURE}"
        )
    if target.delta_layers:
        raise UsageError(
            f"{target.path}: --curve leaves out the states of recurrent layers, and published speedups of such targets "
            f"were up to 38% away: {_MEASURE}"
        )
    if drafter.architecture != "DFlashDraftModel":
        raise UsageError(
            f"{drafter.path}: --curve has times of DFlash drafters only, not of {drafter.architecture}: {_MEASURE}"
        )
    if other := sorted(set(formats) - _FORMATS):
        raise UsageError(
            f"--curve has times of weights in BF16 and of experts in MXFP4 only, as in the published tables, not of "
            f"{', '.join(other)}: {_MEASURE}"
        )


def compute_curves(
    inventory: Inventory,
    settings: Settings,
    acceptance: Acceptance,
    *,
    name: str,
    context: int,
    blocks: Sequence[int],
) -> Curves:
    """The points of one GPU, at 1, 2, 4 and so on requests, as many as its memory holds and the tables have.

    `context`: rows of cache of each request.

    Raises BuildError if not one request fits.
    """
    gpu = settings.gpu
    layout = replace(settings, max_seq_len=context, max_batch_size=1)
    most = min(estimate_memory(inventory, layout).largest_batch, MOST_REQUESTS)
    if most < 1:
        raise BuildError(
            f"{name} does not fit on {gpu.name} with {context} tokens of context: lower --context"
        )
    target = work_of(inventory, "target", gpu)
    drafter = work_of(
        inventory, "drafter", gpu, draft_vocabulary=registry.find(settings.engine).draft_vocabulary
    )
    constants = times.built_in()
    made: dict[str, list[Point]] = {}

    def add(method: str, batch: int, tokens: float, seconds: float) -> None:
        speed = tokens / seconds
        made.setdefault(method, []).append(
            Point(method=method, batch=batch, speed=speed, throughput=batch * speed)
        )

    for batch in (1 << exponent for exponent in range(most.bit_length())):
        seconds = times.plain_seconds(target, gpu, constants, requests=batch, context=context)
        add(PLAIN, batch, 1.0, seconds)
        for block in blocks:
            seconds = times.round_seconds(
                target, drafter, gpu, constants, requests=batch, width=block, context=context
            )
            add(f"block {block}", batch, acceptance.length(block), seconds)
    return Curves(
        target=name,
        gpu=gpu.name,
        times=times.SOURCE,
        context=context,
        acceptance=acceptance,
        points={method: tuple(points) for method, points in made.items()},
    )
