"""What a target family is: the contract of qwen3.py, llama.py and the other modules that families.py lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.mixers import Mixer
from dflash_trt.models.module import Module

# The residual stream [B*S, D] through decoder layer i, whose tokens the mixer mixes.
Layer = Callable[[Module, Mixer, TargetConfig, int, ir.Value], ir.Value]


@dataclass(frozen=True)
class Family:
    """`architecture` and `model_type` are those of config.json.

    `read` turns the file's fields into a configuration, and raises CheckpointError naming the field that it cannot
    take. `layer` adds one decoder layer to a graph.
    """

    architecture: str
    model_type: str
    read: Callable[[Fields], TargetConfig]
    layer: Layer
