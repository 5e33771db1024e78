"""From a bundle to a pair that is ready: its plan for this GPU, memory, and passes of every size that will come."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from dflash_plugins import compiled, plugins
from dflash_plugins.compiled import Kernels
from dflash_plugins.kernel_specs import Use
from dflash_plugins.plugins import VERSION, check_version

from dflash_trt import hardware
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.pair import Pair
from dflash_trt.engines.device.kernels import kernels_here
from dflash_trt.engines.device.memory import memory_errors
from dflash_trt.engines.device.opening import DEVICE, chunk_of, pair_of, warm_up
from dflash_trt.engines.tensorrt.contexts import captures_by_itself, kernel_cache
from dflash_trt.engines.tensorrt.options import FLAVOURS
from dflash_trt.engines.tensorrt.runner import TensorRTRunner
from dflash_trt.errors import BuildError, BundleError, EngineError
from dflash_trt.logs import warn_once

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress

_log = logging.getLogger(__name__)
# TensorRT-RTX compiles in the first pass of a shape, captures the second one, and replays from the third on. The engine
# captures full TensorRT's first pass itself.
_RUNS = 3


@memory_errors()
def open_pair(bundle: Bundle, *, slots: int, prefill_chunk: int, progress: Progress) -> Pair:
    """The bundle's plans for the GPU of this process, with `slots` cache slots, ready for the passes that will come.

    Raises BundleError if the package or a GPU is missing, or if no plan fits. A plan does not fit if it is for another
    GPU, or was built with another version of the package or the plugins. Raises MemoryError if the GPU has too little.
    """
    manifest = bundle.manifest
    check_version(manifest, str(bundle.path))
    trt = _module(bundle)
    plans = _plans(bundle)
    kernels = kernel_cache(trt, bundle.path, torch.cuda.get_device_name())
    chunk = chunk_of(bundle, prefill_chunk, manifest["tensorrt"]["prefill_chunk"])
    stream = torch.cuda.Stream()
    # Only this stream fills memory. torch's default stream is not ordered with it.
    with torch.cuda.stream(stream):
        runners = {
            role: TensorRTRunner(
                *(trt, bundle.path / plans[role]["plan"]),
                slots=slots,
                stream=stream,
                device=torch.device(DEVICE),
                kernels=kernels,
                kinds=bundle.cache_kinds(role),
            )
            for role in bundle.roles
        }
        scratch = max([1, *(runner.memory_size for runner in runners.values())])
        lent = torch.empty(scratch, dtype=torch.uint8, device=DEVICE)
        for runner in runners.values():
            runner.lend(lent)
        kernels_of = partial(_kernels_of, bundle)
        pair = pair_of(bundle, runners, slots=slots, prefill_chunk=chunk, kernels=kernels_of)
    warm_up(pair, manifest["block_size"], progress, runs=_RUNS if captures_by_itself(trt) else 1)
    if kernels is not None:
        kernels.save()
    return pair


def _module(bundle: Bundle) -> Any:
    """TensorRT's module in the version that built the plans, with our plugins registered."""
    built, flavour = bundle.manifest["tensorrt"], FLAVOURS[bundle.manifest["engine"]]
    try:
        trt = flavour.load()
    except BuildError as error:
        raise BundleError(f"{bundle.path}: was built for {flavour.label}, and {error}") from None
    if trt.__version__ != built["version"]:
        raise BundleError(
            f"{bundle.path}: its plans were built with {flavour.label} {built['version']}, but {trt.__version__} is "
            "installed, and plans work only with the version that built them: install that one, or build again"
        )
    hardware.number_gpus_by_bus()
    if not torch.cuda.is_available():
        problem = (
            hardware.torch_problem() or "nvidia-smi shows none (a container has none without --gpus all)"
        )
        raise BundleError(f"{bundle.path}: {flavour.label} needs an NVIDIA GPU; {problem}")
    if "plugins" in built:
        plugins.register(trt)
    return trt


def _plans(bundle: Bundle) -> Mapping[str, Any]:
    """The manifest's entries of the plans for this GPU, by role."""
    major, minor = torch.cuda.get_device_capability()
    built = bundle.manifest["tensorrt"]["plans"]
    plans: Mapping[str, Any] | None = built.get(f"{major}{minor}")
    if plans is None:
        raise BundleError(
            f"{bundle.path}: has plans for compute capability {', '.join(built)}, but this GPU has "
            f"{major}{minor}; build with --compute-capability {major}{minor}"
        )
    return plans


def _kernels_of(bundle: Bundle, wanted: Sequence[Use]) -> Kernels | None:
    """The kernels between passes that a build compiled. None if the bundle or the driver lacks one of `wanted`. A
    warning then says so once.
    """
    entry: Mapping[str, Any] = bundle.manifest["tensorrt"].get("kernels", {})
    try:
        if entry.get("version") != VERSION:
            reason = "has kernels of another version" if entry else "was built without kernels"
            raise BundleError(f"{reason}; build it again where `dflash-trt doctor` finds their compiler")
        kernels = compiled.read(bundle.path / compiled.FILE)
        if missing := [use.function for use in wanted if use.digest not in kernels]:
            raise BundleError(f"{compiled.FILE} lacks {missing[0]} for this pair; build it again")
        return kernels_here(kernels)
    except (BundleError, EngineError) as error:
        warn_once(
            _log,
            f"{bundle.path}: {error}; torch's operators take the place of kernels between passes, and the host samples",
        )
        return None
