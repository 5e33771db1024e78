"""TensorRT and TensorRT-RTX as engines: plans that run on one GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_trt import hardware
from dflash_trt.engines.base import (
    GIB,
    Availability,
    BuildSettings,
    Container,
    EngineEntry,
    MemoryTraits,
    RunSettings,
    Weights,
)
from dflash_trt.engines.device.sizes import ROW_UNIT
from dflash_trt.engines.tensorrt.options import FLAVOURS, TensorRTOptions
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.extras import install

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.tensorrt.plans import PlanJob
    from dflash_trt.formats.precision import Precision
    from dflash_trt.models.inventory import Inventory


class TensorRTEntry(EngineEntry):
    """Runs plans on one GPU."""

    options = TensorRTOptions
    weight_layout = "int4_by_row"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.flavour = FLAVOURS[name]
        self.modules = (self.flavour.module, "torch", "triton")
        self.needed = (self.flavour.module, "torch")
        # TensorRT-RTX's plans ask for up to so much scratch memory beside the estimate from shapes (docs/planning.md).
        # Taken for TensorRT too. The plugins widen no experts, and compute none that nobody chose.
        targets = self.flavour.plugin_capabilities
        self.memory = MemoryTraits(
            scratch_bytes=GIB // 16,
            expert_kernels={"mxfp4": targets},
            keeps_queries=True,
            row_unit=ROW_UNIT,
            idle_blocks=1,
            states=2,  # a pass writes new ones beside those that it reads
            attention_kernels=targets if self.flavour.plugins == "all" else frozenset(),
        )

    def check(self, precision: Precision | None, weights: Weights, options: TensorRTOptions | None) -> None:
        if weights != "copy":
            raise UsageError(
                f"--weights is {weights}, but --engine {self.name} builds plans, and plans contain the weights"
            )

    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> PlanJob:
        from dflash_trt.engines.tensorrt.plans import plan_job

        return plan_job(self.name, pair, settings, progress)

    def open(self, bundle: Bundle, settings: RunSettings) -> Scheduler:
        from dflash_trt.decoding.scheduler import Scheduler
        from dflash_trt.engines.tensorrt.opening import open_pair

        most = min(settings.max_batch_size, bundle.manifest["tensorrt"]["max_batch_size"])
        pair = open_pair(bundle, slots=most, prefill_chunk=settings.prefill_chunk, progress=settings.progress)
        return Scheduler(pair, settings.prefix_cache_bytes)

    def describe(self, bundle: Bundle) -> dict[str, Any]:
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
        return {**super().describe(bundle), "tensorrt": shown, "plans": plans}

    def availability(self, missing: Sequence[str], capabilities: Sequence[int]) -> Availability:
        flavour, ready = self.flavour, not missing
        there = importlib.util.find_spec(flavour.module) is not None
        here = any(map(self.serves, capabilities))
        problem = ""
        if self.lacking():
            problem = f"{'to run' if there else 'to build or run'}: {self.installation()}"
        elif here:
            number = hardware.driver()
            too_old = number is not None and number < hardware.DRIVER
            problem = f"needs driver {hardware.DRIVER} or newer, and {number} is here" if too_old else ""
            problem = problem or hardware.torch_problem()
        serves = f"for compute capability {', '.join(map(str, flavour.capabilities))}"
        return Availability(
            build=ready and there and (flavour.ahead or here),
            run=ready and here and not problem,
            note="; ".join(filter(None, [serves, problem])),
        )

    def serves(self, capability: int) -> bool:
        return capability in self.flavour.capabilities

    def refusal(self, capability: int, inventory: Inventory, formats: Iterable[str]) -> str | None:
        from dflash_trt.formats import FORMATS

        target, needed = inventory.target, set(formats) & set(FORMATS)
        if target.moe is not None:
            needed.discard(target.moe.quantization or "")  # the plugins need no such arithmetic
        try:
            self.flavour.check_capabilities((capability,), (capability,), formats=needed)
        except BuildError as error:
            return str(error)
        return self.flavour.refuses(target, (capability,)) or None

    def window_stride(self, head_dim: int) -> int:
        from dflash_trt.graph.tensorrt import TensorRT

        return TensorRT.window_stride(head_dim)

    def installation(self, manifest: Mapping[str, Any] | None = None) -> str:
        if manifest is None:
            return install(self.name)
        others = install(f"{self.name}:torch", f"{self.name}:triton")
        return others.replace("install", f"install {' '.join(self.container(manifest).packages)}", 1)

    def container(self, manifest: Mapping[str, Any]) -> Container:
        """A plan runs only with the version that built it, which is a wheel, and on torch."""
        version = manifest["tensorrt"]["version"]
        return Container(extra=self.name, packages=(f"{self.flavour.wheel}=={version}",))


def _lengths(profile: Mapping[str, Any]) -> str:
    """A profile's ranges: B 1..8, S 1..16."""
    ranges = {name: lengths for name, lengths in profile.items() if name != "name"}
    return " ".join(
        f"{name} {low}" if low == high else f"{name} {low}..{high}" for name, (low, _, high) in ranges.items()
    )
