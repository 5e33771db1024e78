"""The kernels between passes that a build compiled: loaded through the driver, without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from dflash_plugins import compiled
from dflash_plugins.driver import Kernels
from dflash_plugins.kernel_specs import TARGETS, Use
from dflash_plugins.version import VERSION

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import BundleError, EngineError
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)


def kernels_of(bundle: Bundle, wanted: Sequence[Use]) -> Kernels | None:
    """The bundle's kernels, loaded for this GPU, which are launched on torch's current stream.

    None if the bundle or the driver lacks one of `wanted`. A warning then says so once.
    """
    try:
        return _loaded(bundle, wanted)
    except (BundleError, EngineError) as error:
        warn_once(
            _log,
            f"{bundle.path}: {error}; torch's operators take the place of kernels between passes, and the host samples",
        )
        return None


def compiles_here() -> bool:
    """Whether the kernels that plans hold can be compiled on this machine for its GPU."""
    return _capability() in TARGETS and compiled.trial() is None


def _loaded(bundle: Bundle, wanted: Sequence[Use]) -> Kernels:
    entry: Mapping[str, Any] = bundle.manifest["tensorrt"].get("kernels", {})
    if entry.get("version") != VERSION:
        reason = "has kernels of another version" if entry else "was built without kernels"
        raise BundleError(f"{reason}; build it again where `dflash-trt doctor` finds their compiler")
    kernels = compiled.read(bundle.path / compiled.FILE)
    if missing := [use.function for use in wanted if use.digest not in kernels]:
        raise BundleError(f"{compiled.FILE} lacks {missing[0]} for this pair; build it again")
    return Kernels(
        kernels,
        device=torch.cuda.current_device(),
        stream=lambda: int(torch.cuda.current_stream().cuda_stream),
        compile_kernel=_compile,
    )


def _compile(use: Use) -> compiled.Compiled:
    from dflash_plugins.compiler import compile_kernel

    return compile_kernel(use, _capability())


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
