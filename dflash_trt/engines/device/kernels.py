"""Kernels for the GPU of this process, loaded through its driver, and compiled here where Triton is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from dflash_plugins import compiler
from dflash_plugins.compiled import Compiled, Kernels
from dflash_plugins.kernel_specs import ASKED_BYTES, ROUND_TARGET, SHARED_BYTES, TARGETS, Use

from dflash_trt.errors import BuildError

# A larger tile that spills more bytes of registers is left to the next one. On sm_80 and sm_120, products of 64 rows in
# INT4 and E2M1 spill 88 to 204 bytes and then 0 to 8, and on sm_80 attention of prompts up to 708 (Triton 3.6 to 3.9).
_MOST_SPILLED = 32
_SMALL = {"product": ("BLOCK_N", 64), "attend": ("ROWS", 16)}


def kernels_here(compiled: Mapping[str, Compiled]) -> Kernels:
    """Kernels that were compiled before, by the digests of their uses, launched on torch's current stream. Others are
    compiled when they are launched. Raises EngineError if the driver is missing or refuses one.
    """
    return Kernels(
        compiled,
        device=torch.cuda.current_device(),
        stream=lambda: int(torch.cuda.current_stream().cuda_stream),
        compile_kernel=compile_here,
    )


def compiles_here() -> bool:
    """Whether the kernels of layers can be compiled on this machine for its GPU."""
    return target() is not None and compiler.trial() is None


def compile_here(use: Use) -> Compiled:
    """A kernel for this GPU. Raises BuildError if it cannot be made, or does not fit a launch."""
    kernel = compiler.compile_kernel(use, target() or ROUND_TARGET)
    if (reason := unfit(use, kernel)) is not None:
        raise BuildError(reason)
    return kernel


def unfit(use: Use, kernel: Compiled) -> str | None:
    """Why a launch cannot hold a kernel, or should be of a smaller tile."""
    most = ASKED_BYTES if use.constants.get("CODES") == "plain" else SHARED_BYTES
    if not kernel.stores or kernel.shared_bytes > most:
        return f"{kernel.name} writes nothing, or takes {kernel.shared_bytes} bytes of shared memory"
    size, small = _SMALL.get(use.function, ("", 0))
    if kernel.spill_bytes > _MOST_SPILLED and use.constants.get(size, 0) > small:
        return f"{kernel.name} spills {kernel.spill_bytes} bytes of registers, and a smaller tile less"
    return None


def target() -> int | None:
    """The compute capability that kernels of layers are compiled for here: this GPU's, or the newest one whose code it
    runs. That of 9.0 and later GPUs runs nowhere else. None where there are no such kernels.
    """
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    if capability in TARGETS:
        return capability
    return next((older for older in (89, ROUND_TARGET) if older <= capability), None)
