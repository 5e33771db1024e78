"""The model card of a trained drafter: its purpose, its training data, and its acceptance length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_trt.training.export import contract_breaks
from dflash_trt.training.loop import Recipe

_KINDS = {"DFlash2DraftModel": "DFlash2"}


def model_card(
    target: str,
    config: Mapping[str, Any],
    tapped: Sequence[int],
    recipe: Recipe,
    counts: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
) -> str:
    """README.md of a checkpoint.

    tapped: the layers that the drafter taps. counts: the result of answers.summary, and "steps".
    history: evaluations. The last one may be of this checkpoint.
    """
    taps = ", ".join(str(layer) for layer in tapped if layer >= 0)
    name = _KINDS.get(config["architectures"][0], "DFlash")
    size = config.get("block_size") or config["dflash_config"]["block_size"]
    categories = ", ".join(f"{count} {name or 'others'}" for name, count in counts["categories"].items())
    lines = [
        "---",
        "library_name: transformers",
        f"base_model: {target}",
        "tags: [dflash, speculative-decoding]",
        "---",
        "",
        f"# {name} drafter for {target}",
        "",
        f"A block-diffusion drafter (arXiv 2602.06036) of {config['num_hidden_layers']} layers. It drafts {size - 1} "
        f"tokens in one pass, from hidden states of the target after layers {taps}. It works only with that target, "
        "and does not change the target's tokens.",
        "",
        "## Use",
        "",
        "With `DIR` for this directory, on TensorRT, ONNX Runtime or TensorRT-LLM by dflash-trt:",
        "",
        f"    dflash-trt build --target {target} --drafter DIR --out bundle && dflash-trt serve bundle",
        "",
        "vLLM (name the method: it is guessed from the name of the directory otherwise), SGLang, and the section of "
        "TensorRT-LLM's configuration file:",
        "",
        f"    vllm serve {target} --speculative-config "
        f"""'{{"method": "dflash", "model": "DIR", "num_speculative_tokens": {size - 1}}}'""",
        f"    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path DIR --speculative-num-draft-tokens {size}",
        f"    speculative_config: {{decoding_type: DFlash, speculative_model: DIR, max_draft_len: {size - 1}}}",
        "",
        *(f"TensorRT Edge-LLM refuses it: {each}." for each in contract_breaks(dict(config))),
        "",
        "## Training",
        "",
        f"{counts['steps']} steps of {recipe.batch_size} answers with up to {recipe.anchors} blocks each, "
        f"on {counts['answers']} answers of the target itself ({counts['answer_tokens']} tokens; {categories}). "
        f"Weights of the loss: {'D-PACE (arXiv 2605.18810)' if recipe.weighting == 'dpace' else 'exponential decay'}; "
        f"{recipe.optimizer}, learning rate {recipe.learning_rate:g}; {recipe.shorter:.0%} of the blocks shorter. "
        "Trained with `dflash-trt train drafter`.",
        "",
    ]
    if history and history[-1]["step"] == counts["steps"]:
        lines += ["## Acceptance", "", *_table(history[-1]["figures"], size), ""]
    return "\n".join(lines)


def _table(figures: Mapping[str, Any], size: int) -> list[str]:
    """Tokens per verification pass on held-out prompts, and the acceptance of each position."""
    places = [str(place) for place in range(1, size)]
    rows = [
        "Greedy decoding of held-out prompts with dflash-trt's own loop, whole blocks: tokens per verification pass,",
        "and the share of passes that accepted the draft at each position.",
        "",
        "| category | tokens per pass | " + " | ".join(places) + " |",
        "|---" * (len(places) + 2) + "|",
    ]
    for category, part in figures.items():
        shares = [f"{share:.2f}" for share in part["acceptance_by_place"]]
        shares += [""] * (len(places) - len(shares))
        rows.append(f"| {category} | {part['acceptance_length']:.2f} | " + " | ".join(shares) + " |")
    return rows
