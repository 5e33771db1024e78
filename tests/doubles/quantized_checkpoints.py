"""Checkpoints of one linear layer, or of small models, stored in every quantized format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.formats import ALGORITHMS, FORMATS, numbers
from dflash_trt.formats.numbers import E4M3

INT4_GROUP = 64
NAMES = {
    np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.uint8): "U8", np.dtype(np.int8): "I8", E4M3: "F8_E4M3",
}  # fmt: skip


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


def write_layer(directory: Path, algorithm: str, w: np.ndarray, **more: np.ndarray) -> Checkpoint:
    """A checkpoint of a layer `l` with these weights [outputs, inputs], and more tensors by the ends of their names."""
    directory.mkdir(exist_ok=True)
    tensors = encoded("l", algorithm, w) | {f"l.{name}": value for name, value in more.items()}
    write_safetensors(directory / "model.safetensors", tensors)
    write_quant_config(directory, algorithm)
    return Checkpoint(directory)


def write_quant_config(directory: Path, algorithm: str | None, **fields: Any) -> None:
    """Beside a config.json, which may be there."""
    fields = ({"group_size": INT4_GROUP} if algorithm == "W4A16_AWQ" else {}) | fields
    if not (directory / "config.json").is_file():
        (directory / "config.json").write_text("{}")
    config = {"producer": {"name": "tests"}, "quantization": {"quant_algo": algorithm, **fields}}
    (directory / "hf_quant_config.json").write_text(json.dumps(config))


def encoded(layer: str, algorithm: str, w: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of a layer."""
    named = ALGORITHMS[algorithm]
    if named.scheme == "int4":
        named = replace(named, group_size=INT4_GROUP)
    form, shared = FORMATS[named.scheme], np.ones((), np.float32)
    tensors: dict[str, np.ndarray] = {}
    for name, (_, shape) in form.written(named, *w.shape).items():
        if not shape:
            shared = tensors[name] = form.scale_of(np.abs(w).max())
    tensors |= form.encode(named, w, shared)
    return {f"{layer}.{name}": tensor for name, tensor in tensors.items()}


def rounded(algorithm: str, x: np.ndarray, input_scale: float | None) -> np.ndarray:
    """x rounded as the format does."""
    if not algorithm.startswith(("FP8", "NVFP4")):
        return x
    fp8 = algorithm.startswith("FP8")
    rows = np.ones((len(x), 1), np.float32)
    if not input_scale:
        rows = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(2.0**-100))
    scale = np.float32(input_scale or 1 / (448 if fp8 else 2688))
    if fp8:
        return numbers.encode_e4m3(x / rows / scale).astype(np.float32) * scale * rows
    blocks = (x / rows).reshape(len(x), -1, 16)
    block_scale = np.clip(np.abs(blocks).max(axis=-1) / (6 * scale), 2.0**-9, 448)
    stored = block_scale.astype(numbers.E4M3).astype(np.float32)[..., None] * scale
    return (numbers.E2M1[numbers.encode_e2m1(blocks / stored)] * stored).reshape(x.shape) * rows
