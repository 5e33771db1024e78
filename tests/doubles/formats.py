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
from compressed_tensors.compressors import BaseCompressor, compress_module
from compressed_tensors.compressors.format import infer_model_format
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.linears import StoredLinear, quantized_layers, shape_of, stored_linear
from dflash_trt.checkpoint.tensors import INDEX, Checkpoint
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.numbers import BYTE_TO_PAIR, E4M3, E8M0
from dflash_trt.quantization.repack import widened_pieces
from tests.doubles.quantized_checkpoints import encoded, write_quant_config


def _scales(module: torch.nn.Module) -> None:
    """Fill a layer's quantization parameters from its weight's smallest and largest numbers."""
    args = module.quantization_scheme.weights
    weight = module.weight.data
    rows, columns = weight.shape
    group = args.group_size or columns
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        parts = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high)).transpose(1, 2).flatten(2)
    else:
        parts = weight.reshape(rows, -1, group if group > 0 else columns)
    low, top = parts.amin(-1), parts.amax(-1)
    second = None
    if args.strategy == "tensor_group":
        second = generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data = second.reshape(1)
    scale, zero_point = calculate_qparams(low, top, args, global_scale=second)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)
    if getattr(module, "weight_zero_point", None) is not None:
        module.weight_zero_point.data = zero_point.reshape(module.weight_zero_point.shape).to(torch.int8)
    for name, value in (("input_scale", 0.05), ("input_global_scale", 300.0)):
        if getattr(module, name, None) is not None:
            getattr(module, name).data.fill_(value)


def _tree(tensors: dict[str, torch.Tensor], *, embeddings: bool) -> torch.nn.Module:
    """A module for each part of the tensors' names, with a linear layer for each matrix. An embedding is written as
    such a layer is.
    """
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        path = name.split(".")[:-1]
        if not name.endswith(".weight") or tensor.ndim != 2 or ("embed" in name and not embeddings):
            continue
        place = root
        for part in path[:-1]:
            if part not in place._modules:
                place.add_module(part, torch.nn.Module())
            place = place._modules[part]
        linear = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=tensor.dtype)
        linear.weight.data = tensor
        place.add_module(path[-1], linear)
    return root


def compressed(source: Path, out: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write the checkpoint in `source` to `out` as the package does; returns each layer's weight as it reads it."""
    tensors = load_file(source / "model.safetensors")
    model = _tree(tensors, embeddings="embed" in json.dumps(config))
    config = {"ignore": ["lm_head", "re:.*mlp.gate$"], **config}
    whole = QuantizationConfig(**config)
    apply_quantization_config(model, whole, show_progress=False)
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")
    }
    for module in layers.values():
        _scales(module)
    stored = infer_model_format(model)
    for name, module in layers.items():
        compress_module(module)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in module.state_dict().items()}
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    declared = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": stored.value,
    }
    settings = json.loads((out / "config.json").read_text())
    settings["quantization_config"] = whole.model_dump(mode="json") | declared
    (out / "config.json").write_text(json.dumps(settings))
    weights = {}
    for name, module in layers.items():
        parts = {key: value.data for key, value in module.state_dict().items()}
        reader = BaseCompressor.get_value_from_registry(module.quantization_scheme.format)
        weights[name] = reader.decompress(parts, module.quantization_scheme)["weight"].detach()
    return weights


GROUP = 64
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight outputs each nibble holds


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[a, b] codes -> [a, b * bits / 32] int32, the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(len(codes), -1, per_word)
    words = np.zeros(parts.shape[:2], np.uint32)
    for place, source in enumerate(order or range(per_word)):
        words |= parts[..., source] << np.uint32(bits * place)
    return words.view(np.int32)


def layer(
    weight: np.ndarray, method: str, bits: int, *, symmetric: bool, ordered: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a layer [out, in], and the numbers that they stand for."""
    rows, columns = weight.shape
    groups = columns // GROUP
    index = np.arange(columns) // GROUP
    if ordered:
        index = np.random.default_rng(rows + columns).permutation(index)
    sorted_columns = np.argsort(index, kind="stable")
    parts = weight[:, sorted_columns].reshape(rows, groups, GROUP)
    top = (1 << bits) - 1
    if symmetric:
        scale = np.maximum(np.abs(parts).max(-1) / (1 << (bits - 1)), 1e-6).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        scale = np.maximum((parts.max(-1) - parts.min(-1)) / top, 1e-6).astype(np.float16)
        zero = np.clip(np.rint(-parts.min(-1) / scale.astype(np.float32)), 1, top).astype(int)
    by_column, zero_by_column = scale.astype(np.float32)[:, index], zero[:, index]
    codes = np.clip(np.rint(weight / by_column) + zero_by_column, 0, top).astype(np.uint8)
    stored_zero = zero - (method == "gptq")
    found = {"scales": np.ascontiguousarray(scale.T)}
    if method == "awq":
        found |= {
            "qweight": pack(np.ascontiguousarray(codes.T), 4, AWQ_OUTPUTS),
            "qzeros": pack(np.ascontiguousarray(stored_zero.T), 4, AWQ_OUTPUTS),
        }
    else:
        found |= {
            "qweight": np.ascontiguousarray(pack(codes, bits).T),
            "qzeros": pack(np.ascontiguousarray(stored_zero.T), bits),
            "g_idx": index.astype(np.int32),
        }
    return found, (codes.astype(np.float32) - zero_by_column) * by_column


def in_words(
    source: Path,
    out: Path,
    config: dict[str, Any],
    *,
    method: str,
    bits: int = 4,
    symmetric: bool = True,
    ordered: bool = False,
    pattern: str = "proj$",
) -> dict[str, np.ndarray]:
    """Write the checkpoint in `source` to `out` with the linear layers that `pattern` finds in words; their numbers."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, torch.Tensor] = {}
    numbers = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if base == name or not re.search(pattern, base):
            stored[name] = tensor
            continue
        found, numbers[base] = layer(
            tensor.float().numpy(), method, bits, symmetric=symmetric, ordered=ordered
        )
        stored |= {f"{base}.{end}": torch.from_numpy(value) for end, value in found.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((out / "config.json").read_text())
    settings["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(settings))
    return numbers


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
