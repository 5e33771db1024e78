"""The contract of a kind of drafter: the modules beside this one.

A drafter's graph takes the features that the target committed since the last pass, an anchor and its own caches. It
returns W candidates for each place, best first, with their log-probabilities. docs/graphs.md gives the inputs and
outputs with their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.graph.dialect import Dialect


class BuildDrafter(Protocol):
    """Builds a drafter's graph. It gets the target's checkpoint too, because the two share embedding and LM head."""

    def __call__(
        self,
        config: DrafterConfig,
        checkpoint: Checkpoint | Outline,
        target: TargetConfig,
        target_checkpoint: Checkpoint | Outline,
        dialect: Dialect,
        *,
        folder: str,
        target_folder: str,
        capacity: int | str = "C",
        features_dtype: ir.DataType | None = None,
        width: int = 1,
        head: tuple[Checkpoint | Outline, str] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> ir.Model: ...


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter, with the `architecture` and `model_type` of config.json. Other model types have `also`.

    read: turns the file's fields into a configuration: block size, mask token, and the target's tapped layers.
    build: makes the graph.
    taps: the tapped layers for a target of this many layers, if the file does not name them.
    """

    architecture: str
    model_type: str
    read: Callable[[Fields], DrafterConfig]
    build: BuildDrafter
    taps: Callable[[int], tuple[int, ...]] | None = None
    also: tuple[str, ...] = ()
