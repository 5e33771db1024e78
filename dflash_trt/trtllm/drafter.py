"""The drafter as TensorRT-LLM loads it: taps in ascending order, in BF16, and without code to fetch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.files.disk import whole_file
from dflash_trt.files.reading import read_object

_DROPPED = ("auto_map", "dtype", "torch_dtype")


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
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dflash,
        "dtype": "bfloat16",
    }


def write_weights(config: DrafterConfig, checkpoint: Checkpoint, path: Path) -> None:
    """Write one safetensors file in BF16, with the columns of `fc` in the order of ascending taps."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name in sorted(checkpoint.tensors):
        array = checkpoint.array(name)
        if name == "fc.weight":
            taps = config.target_layer_ids
            order = sorted(range(len(taps)), key=taps.__getitem__)
            columns = array.reshape(array.shape[0], len(taps), config.hidden_size)
            array = columns[:, order].reshape(array.shape)
        arrays[name] = array.astype(ml_dtypes.bfloat16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())
