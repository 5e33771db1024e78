"""Random checkpoints of Muse Glimmer and of Meta's drafter for it, as Transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
)

from tests.doubles.checkpoints import IM_END, MASK, VOCAB, draw, save_drawn

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
