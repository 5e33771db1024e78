"""Drafter checkpoints in z-lab's layout: create, read and write them, with a model card."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_trt.checkpoint.draft_vocabulary import FILE
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError, DFlashError
from dflash_trt.files.disk import write_object
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters.dflash import ROW_SCALE
from dflash_trt.models.drafters.dflash2 import DFlash2
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.dflash2 import DFlash2Drafter
from dflash_trt.training.model import DrafterModel
from dflash_trt.training.recipe import Kind

# What every published DFlash2 drafter has, and NVIDIA's TensorRT Edge-LLM 0.11.0 asks for.
CONTRACT = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_NOISE = 0.1  # scale of the new fc weights beside the copied tap


def default_taps(layers: int) -> list[int]:
    """The tapped layers: evenly from the second to the third-to-last, as in z-lab's drafters."""
    start, end = min(1, layers - 1), max(layers - 3, 0)
    if end <= start:
        return [end]
    taps = min(5, end - start + 1)
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
    scale = {} if target.embedding_scale == 1 else {ROW_SCALE: target.embedding_scale}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": taps, **scale},
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


def dflash2_config(config: dict[str, Any], row_scale: float = 1.0) -> dict[str, Any]:
    """config.json of a DFlash2 drafter, from that of a DFlash drafter of the same sizes.

    row_scale: the target's, which DFlash has without a word and DFlash2 states.
    """
    scale = {} if row_scale == 1 else {ROW_SCALE: row_scale}
    added = CONTRACT | {
        "conv_group_size": math.gcd(CONTRACT["conv_group_size"], config["hidden_size"]),
        "selector_top_k": min(CONTRACT["selector_top_k"], config["vocab_size"]),
    }
    dflash = {**scale, **config["dflash_config"], **added}
    return {**config, "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": dflash}


def open_drafter(configuration: Path, weights: Path | None, target: Path) -> DrafterModel:
    """A drafter in float32: config.json from one directory, and weights from another, or new ones.

    Raises CheckpointError or PairError if it cannot be read or does not belong to the target.
    """
    target_config = read_target_config(target)
    config = read_drafter_config(configuration, target_config)
    check_pair(target_config, config)
    if config.settings is not None and not isinstance(config.settings, DFlash2):
        raise CheckpointError(f"{config.path}: training is for the kinds {', '.join(get_args(Kind))}")
    model: type[DrafterModel] = DrafterModel if config.settings is None else DFlash2Drafter
    if weights is None:
        return model(config)
    checkpoint = Checkpoint(weights)
    if checkpoint.quantization.name is not None:
        name = checkpoint.quantization.name
        raise CheckpointError(f"{weights}: is quantized ({name}); continue from the unquantized drafter")
    tensors: dict[str, Tensor] = {}
    for file in checkpoint.files:
        tensors |= load_file(file)
    try:
        return model(config, tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{weights}: its tensors are not those of config.json: {error}") from None


def write_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file that others may read as any new file; the library gives it to its owner alone.

    Raises OSError, also where the library has an error of its own.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(dict(tensors), file, metadata)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(file)) from error
    file.chmod(mode & 0o777)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `folder` when it is complete."""
    work, old = (folder.with_name(f".{folder.name}.{end}") for end in ("part", "old"))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    yield work
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_checkpoint(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    directory: Path,
    card: str,
    draft_vocabulary: Sequence[int] | None = None,
) -> None:
    """Write config.json, model.safetensors (BF16), README.md and, if given, draft_vocabulary.json.

    `directory` appears or is replaced when complete.
    """
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else None).contiguous()
        for name, value in weights.items()
    }
    with whole_folder(directory) as work:
        write_tensors(tensors, work / "model.safetensors", {"format": "pt"})
        write_object(work / "config.json", config)
        (work / "README.md").write_text(card, encoding="utf-8")
        if draft_vocabulary is not None:
            write_object(work / FILE, {"tokens": list(draft_vocabulary)})


@torch.no_grad()
def start_from_target(drafter: DrafterModel, target: Checkpoint, config: TargetConfig) -> None:
    """Copy the target's last layers, its last tap and its final norm.

    The drafter's rows go through the target's head, so they need the target's final norm. If `fc` passes only the
    last tap on, the drafter's layers see the target's own keys and values of the context. A tensor keeps its random
    start if the target's is missing, quantized or of another shape. An expert layer has no `mlp.gate_proj`, for
    example.
    """
    first = max(0, config.num_hidden_layers - drafter.config.num_hidden_layers)
    for index in range(drafter.config.num_hidden_layers):
        source = f"model.layers.{min(first + index, config.num_hidden_layers - 1)}"
        for name in dict(drafter.layers[index].named_parameters()):
            _copy(drafter, f"layers.{index}.{name}", target, f"{source}.{name}")
        gain = _read(target, f"{source}.input_layernorm.weight")
        for side in (
            "" if config.qk_norm or gain is None else "qk"
        ):  # norms of the size of the target's q and k
            matrix = _read(target, f"{source}.self_attn.{side}_proj.weight")
            if matrix is not None:  # before the gain, rows of the input have a root mean square of 1
                norm = drafter.get_parameter(f"layers.{index}.self_attn.{side}_norm.weight")
                norm.fill_(float((matrix * gain).square().sum(1).mean().sqrt()))
    _copy(drafter, "norm.weight", target, "model.norm.weight")
    last = f"model.layers.{config.num_hidden_layers - 1}"
    _copy(drafter, "hidden_norm.weight", target, f"{last}.input_layernorm.weight")
    size = drafter.config.hidden_size
    newest = int(np.argmax(drafter.config.target_layer_ids))
    drafter.fc.weight *= _NOISE
    drafter.fc.weight[:, newest * size : (newest + 1) * size] += torch.eye(size)


def _read(target: Checkpoint, name: str) -> Tensor | None:
    """A tensor of the target in float32; None if it is missing or quantized."""
    tensor = target.tensors.get(name)
    if tensor is None or tensor.dtype not in ("BF16", "F16", "F32"):
        return None
    return torch.from_numpy(target.array(name).astype(np.float32))


def _copy(drafter: nn.Module, name: str, target: Checkpoint, source: str) -> None:
    """Copy a tensor of the target, if it can be read and has the shape of the drafter's."""
    value, place = _read(target, source), drafter.get_parameter(name)
    if value is not None and value.shape == place.shape:
        place.copy_(value)
