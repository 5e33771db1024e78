"""Small checkpoints that the package compressed-tensors writes, without calibration: scales come from the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.compressors.format import infer_model_format
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


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


def compressed(
    source: Path, out: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Write the checkpoint in `source` to `out` as the package does; returns each layer's weight as it reads it."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    apply_quantization_config(model, QuantizationConfig(**config), show_progress=False)
    layers = {
        name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")
    }
    for module in layers.values():
        _scales(module)
    stored = infer_model_format(model)
    ModelCompressor(
        quantization_config=QuantizationConfig.from_pretrained(model, format=stored.value)
    ).compress_model(model)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((out / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": stored.value,
        **config,
    }
    (out / "config.json").write_text(json.dumps(settings))
    weights = {}
    for name, module in layers.items():
        parts = {
            key.removeprefix(f"{name}."): value
            for key, value in tensors.items()
            if key.startswith(f"{name}.")
        }
        reader = BaseCompressor.get_value_from_registry(module.quantization_scheme.format)
        weights[name] = reader.decompress(parts, module.quantization_scheme)["weight"].detach()
    return weights
