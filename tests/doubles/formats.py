"""Every number format of docs/quantization.md: which layers of a checkpoint are written how, and as which numbers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.linears import StoredLinear, quantized_layers, shape_of, stored_linear
from dflash_trt.checkpoint.tensors import INDEX, Checkpoint
from dflash_trt.checkpoint.widening import widened_pieces
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.numbers import BYTE_TO_PAIR, E4M3, E8M0
from tests.doubles.compressed import compressed
from tests.doubles.integer_words import GROUP, in_words
from tests.doubles.quantized_checkpoints import encoded, write_quant_config

LINEAR = ["Linear"]
PROJECTIONS = "proj$"
Numbers = dict[str, np.ndarray]


def widen(checkpoint: Checkpoint, stored: StoredLinear) -> np.ndarray:
    """The weight that the codes represent, float32 [out, in], without pre_quant_scale."""
    return np.concatenate(list(widened_pieces(checkpoint, stored, 1 << 30)))


def unpack_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 as gpt-oss stores it: uint8 [..., G, 16] and [..., G] -> float32 [..., G*32]."""
    numbers: np.ndarray = BYTE_TO_PAIR[blocks].reshape(*blocks.shape[:-1], BLOCK) * E8M0[scales][..., None]
    return numbers.reshape(*blocks.shape[:-2], -1)


def numbers(type_: str = "int", bits: int = 4, **fields: Any) -> dict[str, Any]:
    return {"type": type_, "num_bits": bits, **fields}


def group(**fields: Any) -> dict[str, Any]:
    return {"group_0": {"targets": LINEAR, **fields}}


PRESETS = (
    *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "NVFP4", "NVFP4A16"),
    *("MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"),
)
COMPRESSED: dict[str, dict[str, Any]] = {preset: {preset: LINEAR} for preset in PRESETS} | {
    "W8A16 asymmetric": group(weights=numbers(bits=8, strategy="group", group_size=32, symmetric=False)),
    "W4A16 by row": group(weights=numbers(strategy="channel", symmetric=False)),
    "FP8 weights": group(weights=numbers("float", 8, strategy="channel")),
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
WORDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPTQ": (GPTQ, {"method": "gptq"}),
    "GPTQ asymmetric": (GPTQ | {"sym": False}, {"method": "gptq", "symmetric": False}),
    "GPTQ 2, ordered": (
        GPTQ | {"sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
        {"method": "gptq_v2", "symmetric": False, "ordered": True},
    ),
    "GPTQ of 8 bits": (GPTQ | {"bits": 8, "sym": False}, {"method": "gptq", "bits": 8, "symmetric": False}),
    "AWQ": (AWQ, {"method": "awq", "symmetric": False}),
}  # fmt: skip


class Optimizer(NamedTuple):
    """A `quant_algo` of Model Optimizer. static: the largest input, for a static scale. smooth: AWQ's factors."""

    algorithm: str
    static: float = 0.0
    smooth: bool = False


OPTIMIZER = {
    "Model Optimizer FP8": Optimizer("FP8", static=20),
    "Model Optimizer FP8 by row": Optimizer("FP8_PER_CHANNEL_PER_TOKEN"), "Model Optimizer NVFP4": Optimizer("NVFP4"),
    "Model Optimizer NVFP4, static": Optimizer("NVFP4", static=20),
    "Model Optimizer NVFP4, AWQ": Optimizer("NVFP4_AWQ", smooth=True),
    "Model Optimizer NVFP4 weights": Optimizer("W4A16_NVFP4"), "Model Optimizer MXFP4": Optimizer("W4A16_MXFP4"),
    "Model Optimizer INT8": Optimizer("W8A16"), "Model Optimizer INT8 by row": Optimizer("W8A16_PER_CHANNEL"),
    "Model Optimizer INT4": Optimizer("W4A16_AWQ", smooth=True),
}  # fmt: skip
FP8_BLOCKS = "FP8 in blocks"
FORMATS = (*COMPRESSED, *WORDS, *OPTIMIZER, FP8_BLOCKS)


def stored_as(name: str, source: Path, out: Path, pattern: str = PROJECTIONS) -> Numbers:
    """Write `source` to `out` with the linear layers whose names `pattern` finds in a format; their numbers."""
    if (
        name in COMPRESSED and pattern == PROJECTIONS
    ):  # by class, and with what is ignored, as the writer has it
        found = compressed(source, out, {"config_groups": COMPRESSED[name]})
        return {layer: weight.float().numpy() for layer, weight in found.items()}
    if name in COMPRESSED:
        groups = json.loads(json.dumps(COMPRESSED[name]).replace('"Linear"', json.dumps(f"re:.*{pattern}")))
        found = compressed(source, out, {"config_groups": groups, "ignore": []})
        return {layer: weight.float().numpy() for layer, weight in found.items()}
    if name in WORDS:
        config, how = WORDS[name]
        if "lm_head" in pattern:
            config = config | {"lm_head": True}
        return in_words(source, out, config, pattern=pattern, **how)
    if name in OPTIMIZER:
        return _of_model_optimizer(OPTIMIZER[name], source, out, pattern)
    return in_fp8_blocks(source, out, pattern)


def _rewritten(
    source: Path, out: Path, pattern: str, layer: Callable[[str, np.ndarray], dict[str, Any]]
) -> None:
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if base == name or not re.search(pattern, base):
            stored[name] = tensor
            continue
        stored |= {key: _tensor(value) for key, value in layer(base, tensor.float().numpy()).items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    if array.dtype == E4M3:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def _of_model_optimizer(how: Optimizer, source: Path, out: Path, pattern: str) -> Numbers:
    smooth = {}

    def layer(base: str, w: np.ndarray) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if how.static:
            most = 448 if how.algorithm == "FP8" else 2688
            more[f"{base}.input_scale"] = np.float32(how.static / most)
        if how.smooth:
            factors = np.random.default_rng(w.shape[1]).uniform(0.5, 2, w.shape[1]).astype(np.float32)
            more[f"{base}.pre_quant_scale"] = smooth[base] = factors
            w = w / factors
        return encoded(base, how.algorithm, w) | more

    _rewritten(source, out, pattern, layer)
    write_quant_config(out, how.algorithm)
    return {base: w * smooth.get(base, np.float32(1)) for base, w in read_numbers(Checkpoint(out)).items()}


def in_fp8_blocks(source: Path, out: Path, pattern: str = PROJECTIONS, size: int = 128) -> Numbers:
    """The same for FP8 with a scale for each block of `size` rows and columns."""
    found = {}

    def layer(base: str, w: np.ndarray) -> dict[str, Any]:
        rows, columns = w.shape
        tiles = torch.from_numpy(w).reshape(rows // size, size, columns // size, size)
        scales = tiles.abs().amax((1, 3), keepdim=True) / 448
        codes = (tiles / scales).to(torch.float8_e4m3fn)
        found[base] = (codes.float() * scales).reshape(rows, columns).numpy()
        return {
            f"{base}.weight": codes.reshape(rows, columns),
            f"{base}.weight_scale_inv": scales[:, 0, :, 0].contiguous(),
        }

    _rewritten(source, out, pattern, layer)
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [size, size],
    }
    (out / "config.json").write_text(json.dumps(config))
    return found


def read_numbers(checkpoint: Checkpoint) -> Numbers:
    """The numbers of a checkpoint's quantized layers, as this project reads them."""
    found = {}
    for layer, algorithm, info in quantized_layers(checkpoint):
        rows, columns = shape_of(checkpoint, algorithm, layer, info)
        stored = stored_linear(checkpoint, layer, columns, rows)
        assert stored is not None
        found[layer] = widen(checkpoint, stored)
    return found


def split(directory: Path, shards: int) -> None:
    """Spread the tensors of a checkpoint over files, those of a layer too."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i in range(shards):
        names = sorted(tensors)[i::shards]
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
