"""The one table of engines. A module is imported when its engine is asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from dflash_trt import hardware
from dflash_trt.engines.base import Availability, Engine, EngineOptions
from dflash_trt.engines.packages import installation, packages_of
from dflash_trt.errors import BundleError, UsageError, did_you_mean, show

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle

# Engine -> its module, which has an `ENGINE`, or several `ENGINES` by name.
_MODULES = {
    "onnxruntime": "dflash_trt.engines.onnxruntime",
    "torch": "dflash_trt.engines.torch",
    "tensorrt-rtx": "dflash_trt.engines.tensorrt",
    "tensorrt": "dflash_trt.engines.tensorrt",
    "tensorrt-llm": "dflash_trt.trtllm",
}
NAMES = tuple(_MODULES)
DEFAULT = "onnxruntime"  # which runs everywhere
SEVERAL = "tensorrt-llm"  # which spreads a pair over several GPUs
AUTO = "auto"
# Those for one GPU, first the one that has run on GPUs (docs/status.md). No plan of the others has.
_ON_GPU = ("torch", "tensorrt-rtx", "tensorrt")


@cache
def find(name: str) -> Engine:
    """The engine with this name. Raises BuildError if there is none."""
    if name not in _MODULES:
        raise UsageError(
            f"--engine is {name!r}{did_you_mean(name, NAMES)}, expected one of: {', '.join(NAMES)}"
        )
    module = importlib.import_module(_MODULES[name])
    engine: Engine = module.ENGINES[name] if hasattr(module, "ENGINES") else module.ENGINE
    return engine


def engine_of(bundle: Bundle) -> Engine:
    """The engine that a bundle was built for. Raises BundleError where this version has no such engine."""
    name = bundle.manifest["engine"]
    if name not in _MODULES:
        raise BundleError(
            f"{bundle.path}: engine is {show(name)}, this version of dflash-trt has: {', '.join(NAMES)}"
        )
    return find(name)


def engines() -> list[Engine]:
    """Every engine."""
    return [find(name) for name in NAMES]


def availability(missing: Sequence[str], capabilities: Sequence[int]) -> dict[str, Availability]:
    """Which engines this machine can build for and run, with GPUs of these compute capabilities.

    missing: packages of the core that are not there, without which no engine does either.
    """
    if missing:
        note = f"install {', '.join(missing)}"
        return dict.fromkeys(NAMES, Availability(build=False, run=False, note=note))
    return {engine.name: engine.available(capabilities) for engine in engines()}


def names_by_options() -> dict[type[EngineOptions], list[str]]:
    """The kinds of options that engines have of their own, and the names of the engines that take them."""
    names: dict[type[EngineOptions], list[str]] = {}
    for engine in engines():
        if engine.options is not None:
            names.setdefault(engine.options, []).append(engine.name)
    return names


class AutoEngine(NamedTuple):
    """The engine that `auto` stands for. `capabilities`: those of the GPUs here."""

    engine: str
    why: str
    capabilities: tuple[int, ...] = ()

    @property
    def leaves_gpu_idle(self) -> bool:
        """Whether it runs on the CPU although there is a GPU."""
        return self.engine == DEFAULT and bool(self.capabilities)

    def __str__(self) -> str:
        return f"engine {self.engine}: {self.why}"


def best_on(capability: int, *, several: bool) -> AutoEngine:
    """What a GPU of this compute capability, or several, run best, where all packages are installed."""
    if several:
        return AutoEngine(SEVERAL, "for several GPUs")
    name = next(name for name in _ON_GPU if find(name).serves(capability))
    return AutoEngine(name, _why(name, capability))


def _why(name: str, capability: int) -> str:
    """Why an engine is chosen for GPUs of this compute capability."""
    others = " or ".join(other for other in _ON_GPU[1:] if find(other).serves(capability))
    if name != _ON_GPU[0] or not others:
        return f"for compute capability {capability}"
    return f"it has run on GPUs, and no plan of {others} has"


def best_here(possible: Callable[[Engine], bool] = lambda engine: True) -> AutoEngine:
    """What this machine runs best, of the engines for which a build is `possible`."""
    here = tuple(dict.fromkeys(hardware.compute_capabilities()))
    if not here:
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        return AutoEngine(DEFAULT, f"{'CUDA_VISIBLE_DEVICES' if hidden else 'nvidia-smi'} shows no GPU here")
    on_gpu = [find(name) for name in _ON_GPU if find(name).serves(here[0])]
    for engine in on_gpu:
        available = engine.available(here)
        if available.build and available.run and possible(engine):
            return AutoEngine(engine.name, _why(engine.name, here[0]), here)
    missing = " or ".join(f"{engine.name} ({installation(engine)})" for engine in on_gpu)
    why = hardware.torch_problem() or f"the GPU that is here needs {missing}"
    return AutoEngine(DEFAULT, f"runs on the CPU; {why}", here)


def require_packages(bundle: Bundle) -> None:
    """Raise BundleError, with the command that installs them, where this machine lacks packages to open a bundle."""
    engine = engine_of(bundle)
    if lacking := engine.lacking():
        image = f" (an image: ENGINE={extra})" if (extra := packages_of(engine).extra) else ""
        raise BundleError(
            f"{bundle.path}: was built for --engine {engine.name}, which needs {', '.join(lacking)}, not installed "
            f"here: {installation(engine, bundle.manifest)}{image}"
        )
