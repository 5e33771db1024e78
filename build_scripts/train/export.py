"""The pair's checkpoints as they are published: Transformers' form for the target, z-lab's for the drafter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from build_scripts.corpus.corpus import CHAT_TEMPLATE
from build_scripts.train.data import SPECIAL_TOKENS
from build_scripts.train.model import Shape, Target

END_OF_TEXT, START, END, MASK = range(len(SPECIAL_TOKENS))


def common_config(shape: Shape, layers: int) -> dict[str, object]:
    return {
        "attention_bias": shape.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END,
        "pad_token_id": END_OF_TEXT,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }


def write_target(target: Target, tokenizer_file: Path, directory: Path) -> None:
    """config.json, generation_config.json, model.safetensors (BF16) and the tokenizer's files."""
    shape = target.shape
    config = Qwen3Config(
        **common_config(shape, shape.target_layers),  # type: ignore[arg-type]
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    weights = {f"model.{name}": tensor for name, tensor in target.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT, eos_token_id=[END, END_OF_TEXT], pad_token_id=END_OF_TEXT, do_sample=False
    )
    directory.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(directory)
    shutil.copyfile(tokenizer_file, directory / "tokenizer.json")
    tokenizer_config = {
        "added_tokens_decoder": {
            str(number): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for number, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": shape.max_position_embeddings,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)


def drafter_config(shape: Shape) -> dict[str, object]:
    """config.json of a drafter, with the names and fields of z-lab's Qwen3-4B-DFlash-b16."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "num_target_layers": shape.target_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": shape.target_layer_ids},
        **common_config(shape, shape.drafter_layers),
        "rope_scaling": shape.rope_scaling,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
