"""The contract of a target family: qwen3.py, llama.py and the other modules that families.py lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer

# Adds decoder layer i to the residual stream [B*S, D]. The mixer mixes the tokens.
Layer = Callable[[Module, Mixer, TargetConfig, int, ir.Value], ir.Value]


@dataclass(frozen=True)
class Family:
    """A target family, with the `architecture` and `model_type` of config.json.

    read: turns the file's fields into a configuration. Raises CheckpointError, naming a field that it cannot take.
    layer: adds one decoder layer to a graph.
    """

    architecture: str
    model_type: str
    read: Callable[[Fields], TargetConfig]
    layer: Layer
