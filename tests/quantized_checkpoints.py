"""Checkpoints of one linear layer, or of small models, stored in every quantized format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint.numbers import E4M3

NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.uint8): "U8",
    E4M3: "F8_E4M3",
}


def write_safetensors(file: Path, tensors: dict[str, Any]) -> None:
    header, data = {}, b""
    for name, value in tensors.items():
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_quant_config(directory: Path, algorithm: str | None, **fields: Any) -> None:
    config = {"producer": {"name": "tests"}, "quantization": {"quant_algo": algorithm, **fields}}
    (directory / "hf_quant_config.json").write_text(json.dumps(config))
