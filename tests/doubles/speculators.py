"""Drafters as the library speculators saves them (version 0.9.0), and their reference in plain torch.

A checkpoint of `kind_checkpoints` is rewritten: fields of the layers go into `transformer_layer_config`, and tap ids
count the layer that is entered. DFlash, DFlash2 and DSpark leave out the embedding, and the head if it has all tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.doubles.checkpoints import MASK, draw, write_json
from tests.doubles.kind_checkpoints import HEAD_DIM, draft_vocabulary, target_config
from tests.doubles.reference import DFlash2, Drafter, Reference
from tests.doubles.reference_kinds import DSpark, Eagle3

_LAYER = (
    *("attention_bias", "hidden_act", "hidden_size", "head_dim", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
)
# The names of the classes that save them.
_CLASSES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "eagle3": "Eagle3DraftModel",
}


def as_speculators(
    directory: Path,
    target: Path,
    model: str,
    *,
    entered: Sequence[int] | None,
    vocabulary: int | None = None,
    layer: dict[str, Any] | None = None,
    seed: int = 11,
    **fields: Any,
) -> Path:
    """Rewrite a checkpoint. entered: ids of taps. vocabulary: tokens of a head. layer, fields: further fields."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    if model != "eagle3":
        tensors.pop("embed_tokens.weight", None)
        head = tensors.pop("lm_head.weight", None)
        if vocabulary is not None:
            tensors["d2t"], tensors["t2d"] = draft_vocabulary(vocab, vocabulary, seed)
            kept = torch.arange(vocabulary) + tensors["d2t"]
            full = draw("lm_head.weight", (vocab, hidden), generator) if head is None else head
            tensors["lm_head.weight"] = full[kept].clone()
            if (w2 := tensors.get("markov_head.markov_w2.weight")) is not None:
                tensors["markov_head.markov_w2.weight"] = w2[kept].clone()
        fields = {"block_size": 8, "mask_token_id": MASK, "aux_hidden_state_layer_ids": entered, **fields}
        fields = {"sample_from_anchor": False, "sliding_window_non_causal": False, **fields}
    else:
        fields["eagle_aux_hidden_state_layer_ids"] = entered
        if (layer or {}).get("model_type", "qwen3") == "qwen3":
            for name in ("q_norm", "k_norm"):
                tensors[f"layers.0.self_attn.{name}.weight"] = draw(f"{name}.weight", (HEAD_DIM,), generator)
        if fields.get("norm_before_fc"):
            tensors["input_norm.weight"] = draw("norm.weight", (3 * hidden,), generator)
    written = {
        "architectures": [_CLASSES[model]],
        "draft_vocab_size": config.get("draft_vocab_size") or vocabulary or vocab,
        "speculators_config": {
            "algorithm": model,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            "verifier": {
                "architectures": target_config(target)["architectures"],
                "name_or_path": "Qwen/Qwen3-8B",
            },
        },
        "speculators_model_type": model,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **fields,
        "transformer_layer_config": {
            **{key: config[key] for key in _LAYER if key in config},
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
            "use_sliding_window": False,
            **(layer or {}),
        },
    }
    write_json(directory / "config.json", written)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _flattened(reference: Reference) -> None:
    """Read the layers' fields where the other references look for them."""
    inner = reference.config["transformer_layer_config"]
    reference.config = {**inner, **reference.config}


class SpeculatorsBlock(Drafter):
    """DFlash. The taps default to what enters layers 2, N/2 and N - 3 of N, here 6."""

    def configure(self) -> None:
        _flattened(self)
        entered = self.config["aux_hidden_state_layer_ids"] or [2, 3, 3]
        self.config["target_layer_ids"] = [layer - 1 for layer in entered]
        if self.config["sliding_window_non_causal"]:
            self.config["is_causal"] = False


class SpeculatorsDFlash2(SpeculatorsBlock, DFlash2):
    pass


class SpeculatorsDSpark(SpeculatorsBlock, DSpark):
    pass


class SpeculatorsEagle3(Eagle3):
    def configure(self) -> None:
        _flattened(self)
        self.config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": self.config["eagle_aux_hidden_state_layer_ids"]
        }
