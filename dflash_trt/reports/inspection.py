"""Describe a directory as plain JSON values: a target, a drafter or a bundle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from dflash_trt.building.first_use import check_path
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.schema import DecoderConfig, DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, parameters_of
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import is_drafter, read_drafter_config, read_target_config

# Fields of the manifest that are shown unchanged, and those of a drafter. Files are shown by name and size.
_DRAFTER = ("tree_width", "mask_token_id", "target_layer_ids")
_SHOWN = (
    *("target", "drafter", "block_size", *_DRAFTER, "hidden_size"),
    *("vocab_size", "eos_token_ids", "max_seq_len", "engine", "precision", "weights", "key", "versions"),
)


def inspect(path: Path) -> dict[str, Any]:
    """Describe a bundle or a checkpoint directory. Reads configurations and headers, never weights.

    Raises CheckpointError or BundleError if it is neither, or malformed.
    """
    check_path(path)
    if (path / "manifest.json").exists():
        return _bundle(path)
    if (path / "config.json").exists():
        return _checkpoint(path)
    state = "has neither manifest.json nor config.json" if path.is_dir() else "is not a directory"
    raise CheckpointError(f"{path}: {state}; expected a bundle, a target or a drafter checkpoint")


def _checkpoint(path: Path) -> dict[str, Any]:
    drafter = is_drafter(path)
    config = read_drafter_config(path) if drafter else read_target_config(path)
    checkpoint = Checkpoint(path)
    by_dtype, parameters = Counter[str](), 0
    for tensor in checkpoint.tensors.values():
        by_dtype[tensor.dtype] += tensor.nbytes
        parameters += parameters_of(tensor, checkpoint.quantization)
    return {
        "kind": "drafter" if drafter else "target",
        "path": str(path),
        **_describe(config),
        "quantization": checkpoint.quantization.name,
        **({"quantized_cache": cache} if (cache := checkpoint.quantization.cache) else {}),
        **_weights(parameters, by_dtype),
        "files": {file.name: file.stat().st_size for file in checkpoint.files},
    }


def _bundle(path: Path) -> dict[str, Any]:
    bundle = Bundle.open(path)
    manifest = bundle.manifest
    sides = [manifest[role] for role in bundle.roles]
    by_dtype = Counter[str]()
    for role in (role for side in sides for role in side["weight_bytes"].values()):
        by_dtype.update(role)
    return {
        "kind": "bundle",
        "path": str(path),
        "format_version": manifest["format_version"],
        **{field: manifest[field] for field in _SHOWN if manifest["drafter"] or field not in _DRAFTER},
        "quantization": manifest.get("quantization", {}),
        **engine_of(bundle).describe(bundle),
        **_weights(sum(side["parameters"] for side in sides), by_dtype),
        "files": {name: entry["size"] for name, entry in manifest["files"].items()},
    }


def _weights(parameters: int, by_dtype: Counter[str]) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "weight_bytes": by_dtype.total(),
        "weight_bytes_by_dtype": dict(by_dtype),
    }


def _describe(config: DecoderConfig) -> dict[str, Any]:
    windows = [layer.window for layer in config.attention_layers]
    fields: dict[str, Any] = {
        "architecture": config.architecture,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "attention_heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "sliding_layers": sum(window is not None for window in windows),
        "rope": config.rope.rope_type,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    if config.delta_layers:
        fields |= {"delta_layers": len(config.delta_layers)}
    if isinstance(config, TargetConfig) and config.moe is not None:
        fields |= {"experts": config.moe.num_experts, "experts_per_token": config.moe.experts_per_token}
    if isinstance(config, DrafterConfig):
        fields |= {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "causal_layers": sum(layer.causal for layer in config.layers),
        }
    return fields
