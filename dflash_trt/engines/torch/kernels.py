"""Our Triton kernels in the layers of a graph: each is compiled as it is first launched, or left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from dflash_plugins import compiler
from dflash_plugins.launch import Run
from dflash_plugins.packed import Packing, Tile

from dflash_trt.engines.device.kernels import kernels_here
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.logs import warn_once

Made = TypeVar("Made")
_log = logging.getLogger(__name__)


class LayerKernels:
    """The kernels on one GPU. `run` must refuse a kernel that it refused before, without trying again."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # The tile of products with weights of a form; None: torch's operators do (packed.py).
        self.packed: dict[tuple[Packing, torch.dtype], Tile | None] = {}
        self.prompts = dict[
            tuple[Packing, torch.dtype], bool
        ]()  # whether torch multiplies many rows in FP8 faster
        self.missing = set[str]()  # what no kernel of ours computes

    def first(
        self, what: str, launched: Callable[[Run, Any], Made], tiles: Sequence[Any] = (None,)
    ) -> Made | None:
        """What `launched` gives with the first of these tiles that compiles and fits. None, with one warning, if none
        does, and torch's operators have to do.
        """
        problems = []
        for tile in tiles:
            try:
                return launched(self.run, tile)
            except (BuildError, EngineError) as error:
                problems.append(str(error))
        self.missing.add(what)
        warn_once(
            _log, f"no kernel of ours for {what} on this GPU: {problems[0]}. torch's operators take its place"
        )
        return None


def tried(what: str, launched: Callable[..., Made], x: Any, *others: Any, **options: Any) -> Made | None:
    """What a launch gives for contiguous tensors on x's device (`LayerKernels.first`); None without kernels."""
    if (layer := of(x)) is None:
        return None
    tensors = [each.contiguous() if isinstance(each, torch.Tensor) else each for each in (x, *others)]
    return layer.first(what, lambda run, _: launched(*tensors, **options, run=run))


def complete(device: torch.device) -> bool:
    """Whether all that passes asked for so far was computed by our kernels."""
    layer = of(torch.empty(0, device=device))
    return layer is not None and not layer.missing


def of(x: torch.Tensor) -> LayerKernels | None:
    """The kernels for this tensor's device; None on a CPU, and where no kernel can be compiled."""
    return _of_this_gpu() if x.is_cuda else None


@cache
def _of_this_gpu() -> LayerKernels | None:
    try:
        if (reason := compiler.trial()) is not None:
            raise BuildError(reason)
        return LayerKernels(kernels_here({}))
    except (BuildError, EngineError) as error:
        warn_once(_log, f"{error}; torch's operators take the place of all kernels")
        return None
