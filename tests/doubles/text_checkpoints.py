"""Random checkpoints of Ministral 3, Gemma 4 and Muse Glimmer, as Transformers itself writes them and as it reads them.

Weights are drawn as in checkpoints.py: logits have order 10, and every norm, scale and tap matters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from tests.doubles.checkpoints import DTYPES, IM_END, MASK, VOCAB, draw, save_drawn, write_json

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "sliding_window": 9,
    "eos_token_id": IM_END, "bos_token_id": None, "output_multiplier": 1.3, "final_logit_softcapping": 25.0,
}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
ASSISTANT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 12, "max_position_embeddings": 4096, "block_size": 8,
    "mask_token_id": MASK, "target_layer_ids": [0, 2, 3],
}  # fmt: skip


def make_muse(directory: Path, *, seed: int = 0, favourites: int = 0, **fields: Any) -> Path:
    """Write a random checkpoint as Transformers does, with a vision tower. `fields`: of the text model."""
    text = TEXT | fields
    config = MuseGlimmerConfig(
        text_config=text,
        vision_config=VISION,
        out_hidden_size=64,
        projector_hidden_size=32,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    model = MuseGlimmerForConditionalGeneration(config)
    save_drawn(model, directory, _draw, seed=seed, favourites=favourites)
    return directory


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    drawn = draw(name, shape, generator)
    return drawn - 1 if "layernorm" in name else drawn  # their weights are centred at zero


def make_assistant(directory: Path, target: Path | None = None, **fields: Any) -> Path:
    """Write a random drafter as Meta publishes it."""
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**ASSISTANT | fields))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(draw(name.replace("output_norm_enc", "norm"), parameter.shape, generator))
    model.save_pretrained(directory)
    return directory


GEMMA, GEMMA_IMAGES = "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"
UNIFIED, UNIFIED_IMAGES = "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"
MINISTRAL, MINISTRAL_IMAGES = "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 65536, "eos_token_id": IM_END,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GEMMA_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 6, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 7, "final_logit_softcapping": 30.0, "pad_token_id": 0,
    "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
YARN = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0,
    "original_max_position_embeddings": 16384, "max_position_embeddings": 65536, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 16,
}  # fmt: skip


def make_ministral(
    directory: Path,
    architecture: str = MINISTRAL,
    *,
    seed: int = 0,
    favourites: int = 0,
    dtype: str = "bfloat16",
    original: int = 16384,
    **fields: Any,
) -> Path:
    """Write a random checkpoint. `fields` replace fields of the text model. `original`: positions before scaling."""
    text = SMALL | {"rope_parameters": YARN | {"original_max_position_embeddings": original}} | fields
    if architecture == MINISTRAL:
        config = transformers.Ministral3Config(**text)
    else:
        config = transformers.Mistral3Config(
            text_config=text | {"model_type": "ministral3"},
            vision_config=_VISION | {"model_type": "pixtral"},
            tie_word_embeddings=text.get("tie_word_embeddings", False),
        )
    model = getattr(transformers, architecture)(config).to(DTYPES[dtype])
    save_drawn(model, directory, draw, seed=seed, favourites=favourites)
    return directory


def make_gemma(
    directory: Path,
    architecture: str = GEMMA,
    *,
    seed: int = 0,
    favourites: int = 0,
    dtype: str = "bfloat16",
    **fields: Any,
) -> Path:
    """Write a random checkpoint. `fields` replace fields of the text model."""
    unified, images = "Unified" in architecture, architecture.endswith("ForConditionalGeneration")
    name = "Gemma4Unified" if unified else "Gemma4"
    text = getattr(transformers, f"{name}TextConfig")(**(SMALL | GEMMA_FIELDS | fields))
    if images:
        vision = {} if unified else {"vision_config": _VISION | {"num_key_value_heads": 2, "head_dim": 16}}
        tie = {"tie_word_embeddings": text.tie_word_embeddings}
        text = getattr(transformers, f"{name}Config")(text_config=text.to_dict(), **vision, **tie)
    model = getattr(transformers, architecture)(text).to(DTYPES[dtype])
    save_drawn(model, directory, _draw_gemma, seed=seed, favourites=favourites)
    return directory


def _draw_gemma(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("q_norm.weight"):  # products of queries and keys are not scaled
        return (1 + 0.2 * noise) * shape[0] ** -0.5
    if name.endswith(("layer_scalar", "layernorm_1.weight", "layernorm_2.weight", "router.scale")):
        return 1 + 0.2 * noise
    if name.endswith("per_expert_scale"):
        return 1 + 0.4 * noise
    return draw(name, shape, generator)


def load_text(directory: Path) -> Any:
    """The text model as Transformers reads it, in float32: callable, with `model.embed_tokens` and `lm_head`."""
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    if architecture.endswith("ForConditionalGeneration"):
        model.model.embed_tokens = model.model.language_model.embed_tokens
    if hasattr(embedding := model.model.embed_tokens, "embed_scale"):
        # Transformers rounds the factor to the table's dtype, which is not the one on disk here.
        stored = next(iter(load_file(directory / "model.safetensors").values())).dtype
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale).to(stored).float()
    return model.eval()


def edit_config(directory: Path, changes: dict[str, Any]) -> None:
    """Set fields of the text model, by their path with dots. None removes a field."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        *sections, field = name.split(".")
        place = config.get("text_config", config)
        for section in sections:
            place = place[section]
        if value is None:
            del place[field]
        else:
            place[field] = value
    write_json(path, config)


def split_experts(directory: Path) -> Path:
    """Store three matrices for each expert, as quantized files have them, in place of a layer's two tensors."""
    file, found = directory / "model.safetensors", dict[str, torch.Tensor]()
    for name, tensor in load_file(file).items():
        before, stack, _ = name.partition("experts.gate_up_proj")
        if stack:
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"{before}experts.{e}.gate_proj.weight"] = gate.clone()
                found[f"{before}experts.{e}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            found |= {
                f"{name.removesuffix('down_proj')}{e}.down_proj.weight": t.clone()
                for e, t in enumerate(tensor)
            }
        else:
            found[name] = tensor
    save_file(found, file, metadata={"format": "pt"})
    return directory
