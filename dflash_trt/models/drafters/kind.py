"""The contract of a kind of drafter: the modules beside this one.

A drafter's graph takes the features that the target committed since the last pass, an anchor and its own caches. It
returns W candidates for each place, best first, with their log-probabilities. docs/graphs.md gives the inputs and
outputs with their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.graph.dialect import Dialect
from dflash_trt.models.passes import Capacity


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter's graph is made from. The target's checkpoint is there because the two share embedding and head.

    folder, target_folder: where the weights lie in the bundle. capacity: cache rows (`Capacity`).
    features_dtype: that of the target's features, by default the dialect's. width: the candidates for each place.
    head: the drafter's own copy of the target's head, and its folder.
    """

    config: DrafterConfig
    checkpoint: Checkpoint | Outline
    target: TargetConfig
    target_checkpoint: Checkpoint | Outline
    dialect: Dialect
    folder: str
    target_folder: str
    capacity: Capacity = "C"
    features_dtype: ir.DataType | None = None
    width: int = 1
    head: tuple[Checkpoint | Outline, str] | None = None


@dataclass(frozen=True)
class DrafterKind:
    """A kind of drafter, with the `architecture` and `model_type` of config.json. Other model types have `also`.

    read: turns the file's fields into a configuration: block size, mask token, and the target's tapped layers. Raises
        CheckpointError if a field is missing, out of range, or requests something not supported.
    build: makes the graph. Raises CheckpointError if a tensor is missing, is unused, or has another shape than the
        config gives.
    taps: the tapped layers for a target of this many layers, if the file does not name them.
    vocabulary_of_target: the file has no vocab_size, and takes the target's.
    """

    architecture: str
    model_type: str
    read: Callable[[Fields], DrafterConfig]
    build: Callable[[DrafterParts], ir.Model]
    taps: Callable[[int], tuple[int, ...]] | None = None
    also: tuple[str, ...] = ()
    vocabulary_of_target: bool = False
