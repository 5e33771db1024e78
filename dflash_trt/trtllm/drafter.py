"""The drafter as TensorRT-LLM loads it: taps in ascending order, in BF16, and without code to fetch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint.quantization import read_quantization
from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.errors import CheckpointError
from dflash_trt.files.reading import read_object

_DROPPED = ("auto_map", "dtype", "torch_dtype")
DFLASH2 = "DFlash2DraftModel"


def check_drafter(config: DrafterConfig) -> None:
    """Check that TensorRT-LLM's class for DFlash and DFlash2 computes what this drafter computes.

    Raises CheckpointError for another kind, for full attention that is causal in a block (JetSpec), and for a quantized
    drafter: the class takes `fc`, key and value projections as plain matrices.
    """
    if config.architecture not in ("DFlashDraftModel", DFLASH2):
        raise CheckpointError(
            f"{config.path}: the architecture is {config.architecture}, but TensorRT-LLM gets DFlashDraftModel and "
            f"{DFLASH2} only; build with another engine"
        )
    if any(layer.causal and layer.window is None for layer in config.layers):
        raise CheckpointError(
            f"{config.path}: rows of a block see earlier rows only (causal_head or is_causal), but TensorRT-LLM's "
            "DFlash lets them see each other; build with another engine"
        )
    quantization = read_quantization(config.path.parent)
    if quantization.name is not None:
        raise CheckpointError(
            f"{quantization.path}: the drafter is quantized, but TensorRT-LLM uses its fc, key and value projections "
            "as plain matrices; give the drafter in BF16"
        )


def as_it_is(config: DrafterConfig, checkpoint: Checkpoint) -> bool:
    """Whether the weights need no change: taps are ascending, and everything is BF16 in one file."""
    ascending = list(config.target_layer_ids) == sorted(config.target_layer_ids)
    dtypes = {tensor.dtype for tensor in checkpoint.tensors.values()}
    return ascending and dtypes == {"BF16"} and len(checkpoint.files) == 1


def drafter_config(config: DrafterConfig) -> dict[str, Any]:
    """config.json with every field where TensorRT-LLM reads it, and without code to fetch."""
    values = {key: value for key, value in read_object(config.path).items() if key not in _DROPPED}
    dflash = dict(values.get("dflash_config", {}))
    dflash |= {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": sorted(config.target_layer_ids),
        "block_size": config.block_size,
    }
    return values | {
        "architectures": [config.architecture],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dflash,
        "dtype": "bfloat16",
    }


def write_weights(config: DrafterConfig, checkpoint: Checkpoint, path: Path) -> None:
    """Write one safetensors file in BF16, with the columns of `fc` in the order of ascending taps."""

    def array(name: str) -> np.ndarray[Any, Any]:
        values = checkpoint.array(name)
        if name == "fc.weight":
            taps = config.target_layer_ids
            columns = values.reshape(len(values), len(taps), config.hidden_size)
            values = columns[:, sorted(range(len(taps)), key=taps.__getitem__)].reshape(values.shape)
        return values.astype(ml_dtypes.bfloat16)

    def entry(name: str, shape: tuple[int, ...]) -> Entry:
        return Entry(name, "BF16", shape, ((key, array(key)) for key in (name,)))

    write_shard(path, [entry(name, tensor.shape) for name, tensor in sorted(checkpoint.tensors.items())])
