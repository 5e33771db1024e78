"""Small checkpoints that the package compressed-tensors writes, without calibration: scales come from the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, compress_module
from compressed_tensors.compressors.format import infer_model_format
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file


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
    said = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": stored.value}
    settings = json.loads((out / "config.json").read_text())
    settings["quantization_config"] = whole.model_dump(mode="json") | said
    (out / "config.json").write_text(json.dumps(settings))
    weights = {}
    for name, module in layers.items():
        parts = {key: value.data for key, value in module.state_dict().items()}
        reader = BaseCompressor.get_value_from_registry(module.quantization_scheme.format)
        weights[name] = reader.decompress(parts, module.quantization_scheme)["weight"].detach()
    return weights
