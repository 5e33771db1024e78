"""Write a drafter in the layouts that other programs read: z-lab's, or that of the library speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dflash_trt.checkpoint.compatibility import check_pair
from dflash_trt.checkpoint.draft_vocabulary import FILE, read_draft_vocabulary
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError
from dflash_trt.files.reading import read_object
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters.dflash2 import DFlash2
from dflash_trt.models.inventory import take_inventory
from dflash_trt.training.checkpoint import write_checkpoint

Form = Literal["zlab", "speculators"]
# What every published DFlash2 drafter has, and NVIDIA's TensorRT Edge-LLM asks for.
CONTRACT = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_TAPS = 5
# Fields of z-lab's config.json that are not those of the layers.
_OWN = ("architectures", "block_size", "dflash_config", "is_causal", "num_target_layers", "dtype")


def contract_breaks(config: dict[str, Any]) -> list[str]:
    """What a DFlash2 drafter has that differs from the published ones, as `field is value`; empty for DFlash."""
    if config["architectures"] != ["DFlash2DraftModel"]:
        return []
    section = config["dflash_config"]
    found = [
        f"{key} is {section[key]}, not {value}" for key, value in CONTRACT.items() if section[key] != value
    ]
    count = len(section["target_layer_ids"])
    return found + [f"target_layer_ids has {count} taps, not {_TAPS}"] * (count != _TAPS)


def export(drafter: Path, target: Path, target_name: str, out: Path, form: Form) -> list[str]:
    """Write the DFlash or DFlash2 drafter of the directory `drafter` to `out`, with its card. Returns warnings.

    target_name: how the reader finds the target, a path or a repository.

    Raises:
        CheckpointError, PairError: a file cannot be read, is of another kind, or does not belong to the target.
    """
    own, checkpoint = read_object(drafter / "config.json"), Checkpoint(drafter)
    target_config = read_target_config(target)
    config = read_drafter_config(drafter, target_config)
    if (
        own.get("architectures") not in (["DFlashDraftModel"], ["DFlash2DraftModel"])
        or checkpoint.quantization.name
    ):
        raise CheckpointError(f"{drafter}: is no unquantized DFlash or DFlash2 drafter in z-lab's layout")
    check_pair(target_config, config)
    take_inventory(
        target_config, config, (Checkpoint(target), checkpoint)
    )  # all tensors are there, in their shapes
    tensors = {
        name: torch.from_numpy(checkpoint.array(name).astype(np.float32)) for name in checkpoint.tensors
    }
    breaks = contract_breaks(own)
    warnings = [f"TensorRT Edge-LLM refuses this drafter: {'; '.join(breaks)}"] if breaks else []
    tokens = None
    if (drafter / FILE).is_file():
        tokens = read_draft_vocabulary(drafter / FILE, target_config.vocab_size)
    if tokens is not None and (form == "zlab" or isinstance(config.own, DFlash2)):
        layout = "z-lab's layout" if form == "zlab" else "DFlash2 in speculators' layout"
        warnings.append(f"{layout} has no draft vocabulary: every token may be drafted")
        tokens = None
    card = (drafter / "README.md").read_text(encoding="utf-8") if (drafter / "README.md").is_file() else ""
    if form == "zlab":
        write_checkpoint(tensors, own, out, card)
        return warnings
    if target_config.embedding_scale != 1:
        raise CheckpointError(
            f"{target}: multiplies embedded tokens by {target_config.embedding_scale:g}, which speculators' readers do "
            "not do for a drafter: use --format zlab"
        )
    if tokens is not None:
        tensors |= _draft_head(Checkpoint(target), target_config, tokens)
    write_checkpoint(tensors, _speculators(own, config, target_config, target_name, tokens), out, card)
    return warnings


def _draft_head(target: Checkpoint, config: TargetConfig, tokens: list[int]) -> dict[str, Tensor]:
    """The rows of the target's head, and the maps between its tokens and those that may be drafted."""
    name = f"{config.prefix}.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    if name not in target.tensors or target.tensors[name].dtype not in ("BF16", "F16", "F32"):
        raise CheckpointError(
            f"{target.directory}: {name} is missing or quantized, so its rows cannot be exported"
        )
    ids = torch.tensor(tokens)
    kept = torch.zeros(config.vocab_size, dtype=torch.bool)
    kept[ids] = True
    rows = torch.from_numpy(target.array(name)[tokens].astype(np.float32))
    return {"lm_head.weight": rows, "d2t": ids - torch.arange(len(tokens)), "t2d": kept}


def _speculators(
    own: dict[str, Any],
    config: DrafterConfig,
    target: TargetConfig,
    target_name: str,
    tokens: list[int] | None,
) -> dict[str, Any]:
    """config.json of speculators' layout. Its taps count the layer that is entered."""
    name = "dflash2" if isinstance(config.own, DFlash2) else "dflash"
    section = own["dflash_config"]
    fields: dict[str, Any] = {
        "speculators_model_type": name,
        "architectures": ["DFlash2DraftModel" if name == "dflash2" else "DFlashSpeculator"],
        "transformer_layer_config": {key: value for key, value in own.items() if key not in _OWN},
        "draft_vocab_size": target.vocab_size if tokens is None else len(tokens),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not any(layer.causal for layer in config.layers),
        "sample_from_anchor": False,
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": target_name, "architectures": [target.architecture]},
        },
    }
    return fields | {key: section[key] for key in CONTRACT if name == "dflash2"}
