"""The one table of engines. An entry is imported when it is asked for, and imports its packages when it is used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, cast

from dflash_trt import hardware
from dflash_trt.engines.base import EngineEntry, EngineOptions
from dflash_trt.errors import BundleError, UsageError, did_you_mean, show

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle

# Engine -> module and class of its entry.
_CLASSES = {
    "onnxruntime": "dflash_trt.engines.onnxruntime.entry.OnnxRuntimeEntry",
    "torch": "dflash_trt.engines.torch.entry.TorchEntry",
    "tensorrt-rtx": "dflash_trt.engines.tensorrt.entry.TensorRTEntry",
    "tensorrt": "dflash_trt.engines.tensorrt.entry.TensorRTEntry",
    "tensorrt-llm": "dflash_trt.trtllm.entry.TensorRTLLMEntry",
}
NAMES = tuple(_CLASSES)
DEFAULT = "onnxruntime"  # which runs everywhere
AUTO = "auto"
# Those for one GPU, first the one that has run on GPUs (docs/status.md). No plan of the others has.
_ON_GPU = ("torch", "tensorrt-rtx", "tensorrt")


@cache
def find(name: str) -> EngineEntry:
    """The engine with this name. Raises BuildError if there is none."""
    if name not in _CLASSES:
        raise UsageError(
            f"--engine is {name!r}{did_you_mean(name, NAMES)}, expected one of: {', '.join(NAMES)}"
        )
    module, _, kind = _CLASSES[name].rpartition(".")
    return cast(EngineEntry, getattr(importlib.import_module(module), kind)(name))


def engine_of(bundle: Bundle) -> EngineEntry:
    """The engine that a bundle was built for. Raises BundleError where this version has no such engine."""
    name = bundle.manifest["engine"]
    if name not in _CLASSES:
        raise BundleError(
            f"{bundle.path}: engine is {show(name)}, this version of dflash-trt has: {', '.join(NAMES)}"
        )
    return find(name)


def engines() -> list[EngineEntry]:
    """Every engine."""
    return [find(name) for name in NAMES]


def names_by_options() -> dict[type[EngineOptions], list[str]]:
    """The kinds of options that engines have of their own, and the names of the engines that take them."""
    names: dict[type[EngineOptions], list[str]] = {}
    for engine in engines():
        if engine.options is not None:
            names.setdefault(engine.options, []).append(engine.name)
    return names


class Choice(NamedTuple):
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


def best_on(capability: int, *, several: bool) -> Choice:
    """What a GPU of this compute capability, or several, run best, where all packages are installed."""
    if several:
        return Choice(next(e.name for e in engines() if e.memory.several_gpus), "for several GPUs")
    name = next(name for name in _ON_GPU if find(name).serves(capability))
    return Choice(name, _why(name, capability))


def _why(name: str, capability: int) -> str:
    """Why an engine is chosen for GPUs of this compute capability."""
    others = " or ".join(other for other in _ON_GPU[1:] if find(other).serves(capability))
    if name != _ON_GPU[0] or not others:
        return f"for compute capability {capability}"
    return f"it has run on GPUs, and no plan of {others} has"


def best_here(possible: Callable[[EngineEntry], bool] = lambda engine: True) -> Choice:
    """What this machine runs best, of the engines for which a build is `possible`."""
    here = tuple(dict.fromkeys(hardware.compute_capabilities()))
    if not here:
        hidden = "CUDA_VISIBLE_DEVICES" in os.environ
        return Choice(DEFAULT, f"{'CUDA_VISIBLE_DEVICES' if hidden else 'nvidia-smi'} shows no GPU here")
    on_gpu = [find(name) for name in _ON_GPU if find(name).serves(here[0])]
    for engine in on_gpu:
        available = engine.availability((), here)
        if available.build and available.run and possible(engine):
            return Choice(engine.name, _why(engine.name, here[0]), here)
    missing = " or ".join(f"{engine.name} ({engine.installation()})" for engine in on_gpu)
    why = hardware.torch_problem() or f"the GPU that is here needs {missing}"
    return Choice(DEFAULT, f"runs on the CPU; {why}", here)


def require_packages(bundle: Bundle) -> None:
    """Raise BundleError, with the command that installs them, where this machine lacks packages to open a bundle."""
    engine = engine_of(bundle)
    if lacking := engine.lacking():
        image = f" (an image: ENGINE={extra})" if (extra := engine.container(bundle.manifest).extra) else ""
        raise BundleError(
            f"{bundle.path}: was built for --engine {engine.name}, which needs {', '.join(lacking)}, not installed "
            f"here: {engine.installation(bundle.manifest)}{image}"
        )
