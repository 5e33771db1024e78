"""What others get of a drafter: its card, and z-lab's layout, which other programs read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.checkpoint.draft_vocabulary import FILE
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError
from dflash_trt.files.reading import read_config
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters.dflash import ROW_SCALE
from dflash_trt.models.inventory import take_inventory
from dflash_trt.training.checkpoint import CONTRACT, write_checkpoint
from dflash_trt.training.evaluation import average
from dflash_trt.training.recipe import Recipe

_FIVE, _BLOCK = 5, 16  # taps and layers; tokens of a block


def contract_breaks(config: Mapping[str, Any]) -> list[str]:
    """What a DFlash2 drafter has that differs from the published ones, as `field is value`; empty for DFlash."""
    if config["architectures"] != ["DFlash2DraftModel"]:
        return []
    section = config["dflash_config"]
    found = [
        f"{key} is {section[key]}, not {value}" for key, value in CONTRACT.items() if section[key] != value
    ]
    taps, layers = len(section["target_layer_ids"]), config["num_hidden_layers"]
    size = section.get("block_size") or config["block_size"]
    found += [f"target_layer_ids has {taps} taps, not {_FIVE}"] * (taps != _FIVE)
    found += [f"num_hidden_layers is {layers}, not {_FIVE}"] * (layers != _FIVE)
    return found + [f"block_size is {size}, more than {_BLOCK}"] * (size > _BLOCK)


def export(drafter: Path, target: Path, out: Path) -> list[str]:
    """Write the DFlash or DFlash2 drafter of the directory `drafter` to `out`, with its card. Returns warnings.

    Raises:
        CheckpointError, PairError: a file cannot be read, is of another kind, or does not belong to the target.
    """
    raw, checkpoint = read_config(drafter / "config.json"), Checkpoint(drafter)
    target_config = read_target_config(target)
    config = read_drafter_config(drafter, target_config)
    if (
        raw.get("architectures") not in (["DFlashDraftModel"], ["DFlash2DraftModel"])
        or checkpoint.quantization.name
    ):
        raise CheckpointError(f"{drafter}: is no unquantized DFlash or DFlash2 drafter in z-lab's layout")
    check_pair(target_config, config)
    # All tensors are there, in their shapes.
    take_inventory(target_config, config, (Checkpoint(target), checkpoint))
    tensors = {
        name: torch.from_numpy(checkpoint.array(name).astype(np.float32)) for name in checkpoint.tensors
    }
    breaks = contract_breaks(raw)
    warnings = [f"TensorRT Edge-LLM refuses this drafter: {'; '.join(breaks)}"] if breaks else []
    if (drafter / FILE).is_file():
        warnings.append("z-lab's layout has no draft vocabulary: every token may be drafted")
    scale = target_config.embedding_scale if config.row_scale is None else config.row_scale
    card = (drafter / "README.md").read_text(encoding="utf-8") if (drafter / "README.md").is_file() else ""
    section = raw["dflash_config"] | ({} if scale == 1 else {ROW_SCALE: scale})
    write_checkpoint(tensors, raw | {"dflash_config": section}, out, card)
    return warnings


_CARD = """\
---
library_name: transformers
base_model: {target}
tags: [dflash, speculative-decoding]
---

# {name} drafter for {target}

A block-diffusion drafter (arXiv 2602.06036) of {layers} layers. It drafts {drafts} tokens in one pass, from hidden
states of the target after layers {taps}. It works only with that target, and does not change the target's tokens.

## Use

With `DIR` for this directory, on TensorRT, ONNX Runtime or TensorRT-LLM by dflash-trt:

    dflash-trt build --target {target} --drafter DIR --out bundle && dflash-trt serve bundle

vLLM (name the method: it is guessed from the name of the directory otherwise), SGLang, and the section of
TensorRT-LLM's configuration file:

    vllm serve {target} --speculative-config \
'{{"method": "dflash", "model": "DIR", "num_speculative_tokens": {drafts}}}'
    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \
--speculative-draft-model-path DIR --speculative-num-draft-tokens {size}
    speculative_config: {{decoding_type: DFlash, speculative_model: DIR, max_draft_len: {drafts}}}

{refused}## Training

{steps} steps of {recipe.batch_size} answers with up to {recipe.anchors} blocks each, on {answers} answers of the target
itself ({answer_tokens} tokens; {categories}). Weights of the loss: D-PACE (arXiv 2605.18810); Muon, learning rate
{recipe.learning_rate:g}; {recipe.shorter:.0%} of the blocks shorter. Trained with `dflash-trt train drafter`.
{measured}"""


_ACCEPTANCE = "## Acceptance"


def with_acceptance(card: str, how: str, greedy: Mapping[str, Any], sampled: Mapping[str, Any]) -> str:
    """A card whose section on acceptance has these figures of `measure`, at temperatures 0 and 1, and how they were
    measured. The section is replaced, or added at the end.
    """
    lines = [
        "| category | tokens per pass | place 1 accepted | place 2 | place 3 | passes | temperature 1: tokens per pass "
        "| passes |",
        "|---" * 8 + "|",
    ]
    for category, part in greedy.items():
        places = [f"{share:.2f}" for share in (*part["acceptance_by_place"], 0, 0)[:3]]
        (length, passes), other = (
            (f"{figures['acceptance_length']:.2f}", str(figures["passes"]))
            for figures in (part, sampled[category])
        )
        lines.append(f"| {' | '.join([category, length, *places, passes, *other])} |")
    mean = (
        f"The mean over categories is {average(greedy):.2f} tokens per pass at temperature 0, and "
        f"{average(sampled):.2f} at temperature 1:"
    )
    before, _, after = card.partition(_ACCEPTANCE)
    _, heading, rest = after.partition("\n## ")
    section = "\n".join([_ACCEPTANCE, "", how, mean, "", *lines, ""])
    return f"{before.rstrip()}\n\n{section}{heading}{rest}"


_MEASURED = "Tokens per verification pass on held-out prompts, greedy and in whole blocks"


def model_card(
    target: str,
    config: Mapping[str, Any],
    tapped: Sequence[int],
    recipe: Recipe,
    counts: Mapping[str, Any],
    figures: Mapping[str, Any] | None = None,
) -> str:
    """README.md of a checkpoint.

    tapped: the layers that the drafter taps. counts: the result of answers.summary, and "steps".
    figures: of the evaluation of this checkpoint.
    """
    size = config.get("block_size") or config["dflash_config"]["block_size"]
    lengths = [
        f"{name or 'others'} {part['acceptance_length']:.2f}" for name, part in (figures or {}).items()
    ]
    return _CARD.format(
        **counts
        | {"categories": ", ".join(f"{n} {name or 'others'}" for name, n in counts["categories"].items())},
        target=target,
        name=config["architectures"][0].removesuffix("DraftModel"),
        layers=config["num_hidden_layers"],
        taps=", ".join(str(layer) for layer in tapped if layer >= 0),
        size=size,
        drafts=size - 1,
        recipe=recipe,
        refused="".join(f"TensorRT Edge-LLM refuses it: {fault}.\n\n" for fault in contract_breaks(config)),
        measured=f"\n{_MEASURED}: {', '.join(lengths)}.\n" if lengths else "",
    )
