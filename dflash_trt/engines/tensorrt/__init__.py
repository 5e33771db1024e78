"""TensorRT and TensorRT-RTX as engines: plans that run on one GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_trt import hardware
from dflash_trt.engines.base import (
    Availability,
    BuildSettings,
    Engine,
    RunSettings,
    Weights,
    describe_caches,
)
from dflash_trt.engines.packages import installation
from dflash_trt.engines.tensorrt.options import FLAVOURS, Flavour, TensorRTOptions
from dflash_trt.errors import BuildError, UsageError

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.tensorrt.plans import PlanJob
    from dflash_trt.formats.precision import Precision
    from dflash_trt.models.inventory import Inventory


def check(
    flavour: Flavour, precision: Precision | None, weights: Weights, options: TensorRTOptions | None
) -> None:
    if weights != "copy":
        raise UsageError(
            f"--weights is {weights}, but --engine {flavour.name} builds plans, and plans contain the weights"
        )


def build(
    flavour: Flavour, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
) -> PlanJob:
    from dflash_trt.engines.tensorrt.plans import plan_job

    return plan_job(flavour.name, pair, settings, progress)


def open(bundle: Bundle, settings: RunSettings) -> Scheduler:
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.tensorrt.opening import open_pair

    most = min(settings.max_batch_size, bundle.manifest["tensorrt"]["max_batch_size"])
    pair = open_pair(bundle, slots=most, prefill_chunk=settings.prefill_chunk, progress=settings.progress)
    return Scheduler(pair, settings.prefix_cache_bytes, settings.prompt_delay)


def describe(bundle: Bundle) -> dict[str, Any]:
    """The versions and GPUs that the plans were built with and for, and the content of each plan."""
    manifest = bundle.manifest
    built = manifest["tensorrt"]
    plans = {
        f"sm{capability}/{role}": {
            "precision": manifest["precision"][role],
            "size": manifest["files"][plan["plan"]]["size"],
            "scratch_bytes": plan["activation_bytes"],
            "weight_bytes": plan["weight_bytes"],
            **{profile["name"]: _lengths(profile) for profile in plan["profiles"]},
        }
        for capability, both in built["plans"].items()
        for role, plan in both.items()
    }
    shown = {field: built[field] for field in ("version", "max_batch_size", "prefill_chunk")}
    return {**describe_caches(bundle), "tensorrt": shown, "plans": plans}


def _lengths(profile: Mapping[str, Any]) -> str:
    """A profile's ranges: B 1..8, S 1..16."""
    ranges = {name: lengths for name, lengths in profile.items() if name != "name"}
    return " ".join(
        f"{name} {low}" if low == high else f"{name} {low}..{high}" for name, (low, _, high) in ranges.items()
    )


def available(flavour: Flavour, capabilities: Sequence[int]) -> Availability:
    engine = ENGINES[flavour.name]
    there = importlib.util.find_spec(flavour.module) is not None
    here = any(map(engine.serves, capabilities))
    problem = ""
    if engine.lacking():
        problem = f"{'to run' if there else 'to build or run'}: {installation(engine)}"
    elif here:
        number = hardware.driver()
        too_old = number is not None and number < hardware.DRIVER
        problem = f"needs driver {hardware.DRIVER} or newer, and {number} is here" if too_old else ""
        problem = problem or hardware.torch_problem()
    serves = f"for compute capability {', '.join(map(str, flavour.capabilities))}"
    return Availability(
        build=there and (flavour.ahead or here),
        run=here and not problem,
        note="; ".join(filter(None, [serves, problem])),
    )


def refuses_gpu(flavour: Flavour, capability: int, inventory: Inventory, formats: Iterable[str]) -> str:
    from dflash_trt.formats import FORMATS

    target, needed = inventory.target, set(formats) & set(FORMATS)
    if target.moe is not None:
        needed.discard(target.moe.quantization or "")  # the plugins need no such arithmetic
    try:
        flavour.check_capabilities((capability,), (capability,), formats=needed)
    except BuildError as error:
        return str(error)
    return flavour.refuses(target, (capability,))


def _engine(flavour: Flavour) -> Engine:
    return Engine(
        name=flavour.name,
        check=partial(check, flavour),
        build=partial(build, flavour),
        open=open,
        describe=describe,
        available=partial(available, flavour),
        refuses_gpu=partial(refuses_gpu, flavour),
        modules=(flavour.module, "torch", "triton"),
        needed=(flavour.module, "torch"),
        options=TensorRTOptions,
        capabilities=flavour.capabilities,
        weight_layout="int4_by_row",
    )


ENGINES = {name: _engine(flavour) for name, flavour in FLAVOURS.items()}
