"""Random drafters of every kind, with tensors and fields as they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.doubles.checkpoints import MASK, dflash_shapes, draw, layer_shapes, write_json

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4, 2, 16, 96


def _write(
    directory: Path,
    config: dict[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    **others: torch.Tensor,
) -> Path:
    """`others`: tensors that are not drawn. Names of shapes are in alphabetical order for the generator."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: draw(name, shape, generator) for name, shape in sorted(shapes.items())}
    save_file({**tensors, **others}, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def target_config(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    return config.get("text_config", config)


def draft_vocabulary(vocab: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t, offsets of `size` tokens, and t2d, the mask of them."""
    kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[kept] = True
    return kept - torch.arange(size), mask


def make_eagle3(
    directory: Path,
    target: Path,
    *,
    layout: str = "midlayer",
    vocabulary: int | None = 200,
    seed: int = 5,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    embedding: bool = False,
    aux: tuple[int, ...] | None = None,
    heads: int = HEADS,
) -> Path:
    """An EAGLE-3 head. layout: "midlayer" as SafeAILab's, with `aux` as SpecForge's; "layers.0" as Model Optimizer's.

    vocabulary None: all tokens. embedding: a copy of the target's is in the file. aux: the ids of tapped states.
    """
    of_target = target_config(target)
    hidden, vocab = of_target["hidden_size"], of_target["vocab_size"]
    size = vocabulary or vocab
    config = {
        "architectures": ["LlamaForCausalLM" if layout == "midlayer" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "vocab_size": vocab,
        "draft_vocab_size": size,
        "tie_word_embeddings": False,
        **({"fc_norm": True} if fc_norm else {}),
        **({"norm_output": True} if norm_output else {}),
    }
    if layout == "layers.0":
        config |= {"head_dim": HEAD_DIM, "rope_theta": 10_000.0, "rope_scaling": None}
        config["eagle_config"] = {
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            **({"eagle_aux_hidden_state_layer_ids": list(aux)} if aux else {}),
            **({"norm_before_fc": True} if norm_before_fc else {}),
        }
    elif aux:
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        ids = {"eagle_aux_hidden_state_layer_ids": list(aux)}
        config["eagle_config"] = {"use_aux_hidden_state": True, **ids}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (size, hidden),
        f"{layout}.hidden_norm.weight": (hidden,),
        **layer_shapes(layout, {"head_dim": HEAD_DIM, **config}, 2 * hidden),
    }
    if norm_before_fc:
        shapes["input_norm.weight"] = (3 * hidden,)
    if fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(3)}
    others: dict[str, torch.Tensor] = {}
    if vocabulary is not None:
        others["d2t"], others["t2d"] = draft_vocabulary(vocab, size, seed)
    if embedding:
        others["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    return _write(directory, config, shapes, seed, **others)


def dflash_fields(target: Path, architecture: str, layers: int) -> dict[str, Any]:
    """The fields of config.json that all drafters with DFlash's layers share, as Transformers 4 writes them."""
    of_target = target_config(target)
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": of_target["hidden_size"],
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": of_target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "vocab_size": of_target["vocab_size"],
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def make_dflash2(
    directory: Path,
    target: Path,
    *,
    block_size: int = 8,
    window: int | None = None,
    softcap: float | None = None,
    multiplier: float | None = None,
    scale: float | None = None,
    layers: int = 2,
    confidence: bool = False,
    seed: int = 6,
) -> Path:
    """A DFlash2 drafter. The selector's share of the scores is about as large as the logits.

    confidence: with a head that reads the row and the token before.
    """
    config = dflash_fields(target, "DFlash2DraftModel", layers)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    del config["rope_scaling"]
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    if window is not None:
        config |= {
            "layer_types": ["sliding_attention"] * layers,
            "use_sliding_window": True,
            "sliding_window": window,
        }
    config |= {
        "is_causal": False,
        "dflash_config": {
            "block_size": block_size,
            "mask_token_id": MASK,
            "target_layer_ids": [1, 3],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 24,
            "selector_top_k": 6,
            **({} if softcap is None else {"final_logit_softcapping": softcap}),
            **({} if multiplier is None else {"output_multiplier": multiplier}),
            **({} if scale is None else {"input_embedding_scale": scale}),
        },
    }
    shapes = dflash_shapes(config, 2)
    for i in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{name}.base_kernel"] = (2, 2, hidden)
            shapes[f"layers.{i}.{name}.kernel_projection.weight"] = (2 * 2 * hidden // 16, hidden)
    shapes |= {
        "candidate_selector.predecessor_codebook": (vocab, 24),
        "candidate_selector.successor_codebook": (vocab, 24),
        "candidate_selector.hidden_projection.weight": (24, hidden),
    }
    if confidence:
        shapes["candidate_selector.confidence_head.weight"] = (1, hidden + 24)
        shapes["candidate_selector.confidence_head.bias"] = (1,)
    return _write(directory, config, shapes, seed)


def make_dspark(
    directory: Path,
    target: Path,
    *,
    head: str = "vanilla",
    rank: int = 24,
    confidence: bool = False,
    seed: int = 7,
) -> Path:
    """A DSpark drafter; rank 0: DeepSpec's DFlash. Its fields are at the top level, and its rows all predict."""
    config = dflash_fields(target, "Qwen3DSparkModel", 2)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {
        "block_size": 7,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 2],
        "markov_rank": rank,
        "markov_head_type": head,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and rank > 0,
    }
    shapes = dflash_shapes(config, 2)
    shapes |= {"embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    if rank:
        shapes |= {f"markov_head.markov_w{i}.weight": (vocab, rank) for i in (1, 2)}
        if head == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif head == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + rank)
        shapes["confidence_head.proj.bias"] = (1,)
    return _write(directory, config, shapes, seed)


def as_specforge(
    directory: Path,
    *,
    prefix: str = "",
    architecture: str = "DSparkDraftModel",
    window: int | None = None,
    **fields: Any,
) -> Path:
    """Rewrite a DSpark drafter as SpecForge saves it: fields in `dflash_config`, no embedding, no head.

    prefix: of the heads' names, as early versions saved them. fields: further ones at the top.
    """
    config = json.loads((directory / "config.json").read_text())
    names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    names = (*names, "enable_confidence_head", "confidence_head_with_markov")
    of_heads = {name: config.pop(name) for name in names}
    of_heads |= {"projector_type": "dspark", "attention_mode": "gqa", "target_layer_ids": [0, 2]}
    config |= {"architectures": [architecture], "dflash_config": of_heads, **fields}
    if window is not None:
        kinds = ["sliding_attention", "full_attention"]
        config |= {"layer_types": kinds, "use_sliding_window": True, "sliding_window": window}
    write_json(directory / "config.json", config)
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("embed", "lm_head"))}
    named = {(prefix if "_head." in name else "") + name: tensor for name, tensor in kept.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_jetspec(directory: Path, target: Path, *, seed: int = 9) -> Path:
    """A JetSpec head: DFlash's tensors, and a causal block."""
    config = dflash_fields(target, "DFlashDraftModel", 2)
    dflash = {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": [1, 4], "causal_head": True}
    return _write(directory, {**config, "dflash_config": dflash}, dflash_shapes(config, 2), seed)


def make_gemma_dspark(
    directory: Path, target: Path, *, keys_as_values: bool = True, rank: int = 24, seed: int = 10
) -> Path:
    """DeepSpec's drafter for Gemma 4: the text model's fields with 2 layers, all of which see all tokens."""
    of_target = json.loads((target / "config.json").read_text())
    config = of_target.get("text_config", of_target)
    size, kv_heads, hidden = 24, 1 if keys_as_values else 2, config["hidden_size"]
    config = {name: value for name, value in config.items() if name != "per_layer_config"} | {
        "architectures": ["Gemma4DSparkModel"], "attention_k_eq_v": keys_as_values, "global_head_dim": size,
        "num_global_key_value_heads": 1, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2,
        "enable_moe_block": False, "tie_word_embeddings": False, "block_size": 7, "mask_token_id": MASK,
        "target_layer_ids": [0, 3, 5], "markov_rank": rank, "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }  # fmt: skip
    inner, vocab = config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        **{f"{name}.weight": (hidden,) for name in ("hidden_norm", "norm")},
        **({f"markov_head.markov_w{i}.weight": (vocab, rank) for i in (1, 2)} if rank else {}),
    }
    sizes = {"q": config["num_attention_heads"], "k": kv_heads, **({} if keys_as_values else {"v": kv_heads})}
    for i in range(2):
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"layers.{i}.{name}_layernorm.weight"] = (hidden,)
        shapes |= {f"layers.{i}.self_attn.{n}_proj.weight": (c * size, hidden) for n, c in sizes.items()}
        shapes[f"layers.{i}.self_attn.o_proj.weight"] = (hidden, sizes["q"] * size)
        shapes |= {f"layers.{i}.self_attn.{name}_norm.weight": (size,) for name in "qk"}
        shapes |= {f"layers.{i}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
    scalars = {f"layers.{i}.layer_scalar": torch.tensor([0.7 + 0.5 * i]) for i in range(2)}
    _write(directory, config, shapes, seed, **scalars)
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith("q_norm.weight"):  # products of queries and keys are not scaled
            tensors[name] *= size**-0.5
    tensors["lm_head.weight"] *= 3.0 * hidden**-0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
