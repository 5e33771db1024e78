"""Drafter checkpoints in z-lab's layout: create, read and write them, with a model card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_trt.checkpoint.compatibility import check_pair
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError, DFlashError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.model import Drafter

_DEFAULT_TAPS = 5


def default_taps(layers: int, taps: int = _DEFAULT_TAPS) -> list[int]:
    """The tapped layers: evenly from the second to the third-to-last, as in z-lab's drafters."""
    start, end = min(1, layers - 1), max(layers - 3, 0)
    if end <= start:
        return [end]
    taps = min(taps, end - start + 1)
    return sorted({round(start + i * (end - start) / max(taps - 1, 1)) for i in range(taps)})


def default_mask_token(tokenizer: Tokenizer, target: TargetConfig) -> int:
    """A token that is embedded and does not occur: one without text, else a special token that chats do not use.

    Raises DFlashError if there is none.
    """
    backend = tokenizer.backend
    vocabulary = backend.get_vocab(with_added_tokens=True)
    used = set(vocabulary.values())
    unused = [index for index in range(target.vocab_size) if index not in used]
    if unused:
        return unused[0]
    spoken = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    )
    rendered = set(backend.encode(spoken, add_special_tokens=True).ids)
    kept = rendered | set(target.eos_token_ids) | {target.bos_token_id, 0}
    special = [
        i for i, token in backend.get_added_tokens_decoder().items() if token.special and i not in kept
    ]
    if not special:
        raise DFlashError(
            f"{tokenizer.directory}: has neither unused nor spare special tokens; give --mask-token-id"
        )
    return max(special)


def new_config(
    target: TargetConfig, *, layers: int, taps: list[int], block_size: int, mask_token_id: int
) -> dict[str, Any]:
    """config.json of a drafter with the target's sizes and RoPE base, without RoPE scaling."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": taps},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": target.intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": layers,
        "num_attention_heads": target.num_attention_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": target.num_key_value_heads,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": target.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
        "dtype": "bfloat16",
    }


def open_drafter(configuration: Path, weights: Path | None, target: Path) -> Drafter:
    """A drafter in float32: config.json from one directory, and weights from another, or new ones.

    Raises CheckpointError or PairError if it cannot be read or does not belong to the target.
    """
    config = read_drafter_config(configuration)
    check_pair(read_target_config(target), config)
    if weights is None:
        return Drafter(config)
    checkpoint = Checkpoint(weights)
    if checkpoint.quantization.name is not None:
        name = checkpoint.quantization.name
        raise CheckpointError(f"{weights}: is quantized ({name}); continue from the unquantized drafter")
    tensors: dict[str, Tensor] = {}
    for file in checkpoint.files:
        tensors |= load_file(file)
    try:
        return Drafter(config, tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{weights}: its tensors are not those of config.json: {error}") from None


def write_checkpoint(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path, card: str
) -> None:
    """Write config.json, model.safetensors (BF16) and README.md. `directory` appears or is replaced when complete."""
    work = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in weights.items()}
    save_file(tensors, work / "model.safetensors", {"format": "pt"})
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (work / "README.md").write_text(card, encoding="utf-8")
    shutil.rmtree(directory, ignore_errors=True)
    work.rename(directory)
