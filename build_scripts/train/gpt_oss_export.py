"""Write and read the target of `tiny-gpt-oss` in published form: experts in MXFP4, everything else in BF16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from build_scripts.train.export import END, END_OF_TEXT, write_json
from build_scripts.train.gpt_oss_chat import CHAT_TEMPLATE
from build_scripts.train.gpt_oss_model import (
    EXPERT_SIZE,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    LIMIT,
    WINDOW,
    YARN,
    GptOss,
    blocks_of,
    mxfp4_round,
    mxfp4_scale,
)
from build_scripts.train.model import Shape, Target
from dflash_trt.formats.mxfp4 import unpack_blocks
from dflash_trt.formats.numbers import E2M1

# Parameter of Experts -> its published name.
EXPERT_NAMES = {"gate_up": "gate_up_proj", "down": "down_proj"}


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [E, out, G, 16], two numbers per byte, low half first, and scales uint8 [E, out, G]."""
    scale = mxfp4_scale(weight)
    numbers = blocks_of(mxfp4_round(weight)) / scale
    codes = (numbers[..., None] - torch.from_numpy(E2M1)).abs().argmin(-1).to(torch.uint8)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return blocks.contiguous(), (scale[..., 0].log2().round() + 127).to(torch.uint8)


def write_target(target: Target, tokenizer_file: Path, directory: Path) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in target.state_dict().items():
        place, _, parameter = name.rpartition(".")
        if place.endswith("mlp"):
            value = _in_turns(value) if parameter.startswith("gate_up") else value
            published = f"model.{place}.experts.{EXPERT_NAMES[parameter.removesuffix('_bias')]}"
            if parameter.endswith("_bias"):
                tensors[f"{published}_bias"] = value.bfloat16()
            else:
                tensors[f"{published}_blocks"], tensors[f"{published}_scales"] = pack_mxfp4(value)
        else:
            tensors[name if name.startswith("lm_head") else f"model.{name}"] = value.bfloat16()
    save_file(
        {name: value.contiguous() for name, value in sorted(tensors.items())},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    write_json(directory / "config.json", _config(target.shape))
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": END_OF_TEXT,
            "do_sample": False,
            "eos_token_id": [END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
        },
    )
    shutil.copyfile(tokenizer_file, directory / "tokenizer.json")
    added = json.loads(tokenizer_file.read_text(encoding="utf-8"))["added_tokens"]
    write_json(
        directory / "tokenizer_config.json",
        {
            "added_tokens_decoder": {str(token.pop("id")): token for token in added},
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|return|>",
            "model_max_length": target.shape.max_position_embeddings,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": None,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def load_target(shape: Shape, directory: Path) -> GptOss:
    """The target with the exact values of its file, in float32, for inference."""
    stored = load_file(directory / "model.safetensors")
    weights: dict[str, Tensor] = {}
    target = GptOss(shape)
    for name in target.state_dict():
        place, _, parameter = name.rpartition(".")
        if not place.endswith("mlp"):
            weights[name] = stored[name if name.startswith("lm_head") else f"model.{name}"].float()
            continue
        published = f"model.{place}.experts.{EXPERT_NAMES[parameter.removesuffix('_bias')]}"
        if parameter.endswith("_bias"):
            value = stored[f"{published}_bias"].float()
        else:
            packed = (stored[f"{published}_{part}"].numpy() for part in ("blocks", "scales"))
            value = torch.from_numpy(np.ascontiguousarray(unpack_blocks(*packed)))
        weights[name] = _halves(value) if parameter.startswith("gate_up") else value
    target.load_state_dict(weights)
    return target.eval()


def _in_turns(halves: Tensor) -> Tensor:
    """Interleave the rows gate 0 .. I-1, up 0 .. I-1 of [E, 2I, ...] to gate 0, up 0, gate 1, ..."""
    return halves.view(EXPERTS, 2, EXPERT_SIZE, *halves.shape[2:]).transpose(1, 2).flatten(1, 2)


def _halves(turns: Tensor) -> Tensor:
    return turns.view(EXPERTS, EXPERT_SIZE, 2, *turns.shape[2:]).transpose(1, 2).flatten(1, 2)


def _config(shape: Shape) -> dict[str, object]:
    layers = shape.target_layers
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END,
        "experts_per_token": EXPERTS_PER_TOKEN,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initial_context_length": YARN["original_max_position_embeddings"],
        "initializer_range": 0.02,
        "intermediate_size": EXPERT_SIZE,
        "layer_types": [("sliding_attention", "full_attention")[index % 2] for index in range(layers)],
        "max_position_embeddings": shape.max_position_embeddings,
        "model_type": "gpt_oss",
        "num_attention_heads": shape.num_attention_heads,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "num_local_experts": EXPERTS,
        "output_router_logits": False,
        "pad_token_id": END_OF_TEXT,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": YARN,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": 0.9,
        "sliding_window": WINDOW,
        "swiglu_limit": LIMIT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }
