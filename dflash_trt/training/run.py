"""A complete training run in a folder: from data and drafter to checkpoints, a curve and a model card.

OUT/checkpoint/     the newest weights            OUT/best/      the weights with the longest acceptance so far
OUT/evaluation.jsonl, OUT/acceptance.svg          OUT/held_out.jsonl  the prompts that it is measured with
OUT/log.jsonl, OUT/recipe.json, OUT/drafter.json, OUT/state/
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dflash_trt.checkpoint.draft_vocabulary import FILE, most_frequent, read_draft_vocabulary
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_config, read_object
from dflash_trt.models.configs import read_target_config
from dflash_trt.prompts import Prompt, read_prompts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training import checkpoint as drafters
from dflash_trt.training.answers import (
    Answer,
    GrowingFile,
    digest,
    hold_out,
    read_answers,
    summary,
    write_prompts,
)
from dflash_trt.training.blocks import Batches
from dflash_trt.training.dflash2 import DFlash2Drafter
from dflash_trt.training.evaluation import average, draw_curve, measure, read_history
from dflash_trt.training.export import model_card
from dflash_trt.training.loop import make_accelerator, same_as_before, train
from dflash_trt.training.recipe import FURTHER_RATE, NEW_RATE, Design, Recipe
from dflash_trt.training.target import FrozenTarget, matrix_dtype

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}


def run(
    target: Path,
    target_name: str,
    data: Path,
    out: Path,
    design: Design,
    recipe: Recipe,
    *,
    held_out: Path | None = None,
    evaluate_every: int | None = 0,
    report: Callable[[dict[str, Any]], None] = lambda line: None,
) -> int:
    """Train a drafter for the target in `out`, or resume the run there; returns after which step it ended.

    That is recipe.steps, or fewer if the process was asked to end. Prompts of the file `held_out`, or a share of those
    of the answers, are not trained on (`hold_out`). The drafter is measured with them before the first step, every
    `evaluate_every` steps and at the end; with None never.

    Raises DFlashError if `out` holds a run with another drafter or recipe, and any error of reading the inputs.
    """
    accelerator = make_accelerator()
    target_config = read_target_config(target)
    config = _drafter_config(out / "drafter.json", target, target_config, design)
    answers = read_answers(data)
    for answer in answers:
        if (largest := max(answer.token_ids)) >= target_config.vocab_size:
            raise DFlashError(
                f"{data}: answer {answer.id} has token {largest}, but the target embeds {target_config.vocab_size}: "
                "the answers are of another target"
            )
    if recipe.learning_rate is None:
        recipe = replace(recipe, learning_rate=NEW_RATE if design.checkpoint is None else FURTHER_RATE)
    answers, prompts = hold_out(answers, held_out, data)
    if held_out is not None:
        recipe = replace(recipe, held_out=digest(prompts))
    _write_beginning(out, config, prompts, accelerator)
    torch.manual_seed(recipe.seed)  # for the weights of a new drafter
    allowed = _draft_vocabulary(out / "beginning" / FILE, design, answers, target_config)
    batches = Batches(answers, recipe.batch_size, recipe.max_length, recipe.seed)
    drafter = drafters.open_drafter(out / "beginning", design.checkpoint, target)
    if accelerator.is_main_process:
        write_object(out / "drafter.json", config)  # only now does the run have to continue with this drafter
    # Without autocast, the drafter computes in float32, and takes nothing else.
    narrow, read = accelerator.mixed_precision == "bf16", drafter.config
    frozen = FrozenTarget(
        *(target, target_config, read.target_layer_ids, accelerator.device),
        matrix_dtype(accelerator.device) if narrow else torch.float32,
        final=recipe.distill > 0,
        row_scale=read.row_scale,
    )
    if design.checkpoint is None:
        drafters.start_from_target(drafter, Checkpoint(target), target_config)
    if isinstance(drafter, DFlash2Drafter):
        drafter.start_selector(frozen.embedding)
    counts = summary(batches.answers)

    def card(step: int, figures: Any) -> str:
        counted = {**counts, "steps": step}
        return model_card(target_name, config, read.target_layer_ids, recipe, counted, figures)

    def keep(step: int, weights: dict[str, Tensor]) -> None:
        """Write the checkpoint of a step with its card, and measure it with the prompts that are held out."""
        history = read_history(out / "evaluation.jsonl")
        published, known = drafter.published(weights, frozen.embedding), history.get(step)
        drafters.write_checkpoint(published, config, out / "checkpoint", card(step, known), allowed)
        if evaluate_every is None or known is not None:
            return
        # Answers may have been added since the run began, but its evaluations have the same prompts.
        asked = read_prompts(out / "held_out.jsonl", recipe.limit)
        report({"step": step, "measuring": len(asked)})
        figures = measure(target, out / "checkpoint", asked, out / "work", max_tokens=recipe.eval_tokens)
        with GrowingFile(out / "evaluation.jsonl") as file:
            file.append({"step": step, "figures": figures})
        draw_curve(history | {step: figures}, out / "acceptance.svg")
        (out / "checkpoint" / "README.md").write_text(card(step, figures), encoding="utf-8")
        if average(figures) > max(map(average, history.values()), default=0.0):
            with drafters.whole_folder(out / "best") as best_so_far:
                shutil.copytree(out / "checkpoint", best_so_far, dirs_exist_ok=True)
        report({"step": step, "acceptance_length": round(average(figures), 3), "figures": figures})

    train(
        *(drafter, frozen, batches, recipe, out, accelerator),
        evaluate_every=evaluate_every or 0,
        on_weights=keep,
        report=report,
    )
    return int(read_object(out / "state" / "state.json")["step"])


def _write_beginning(
    out: Path, config: dict[str, Any], prompts: Sequence[Prompt], accelerator: Accelerator
) -> None:
    """What a run has before its first step. The held-out prompts are those of its first call."""
    accelerator.wait_for_everyone()  # the others read what was there before
    if accelerator.is_main_process:
        (out / "beginning").mkdir(parents=True, exist_ok=True)
        write_object(out / "beginning" / "config.json", config)
        if not (out / "held_out.jsonl").exists():
            write_prompts(out / "held_out.jsonl", prompts)
    accelerator.wait_for_everyone()


def _drafter_config(file: Path, target: Path, target_config: TargetConfig, design: Design) -> dict[str, Any]:
    """config.json of the drafter. If a run exists, it must be the same as that run's."""
    if design.checkpoint is not None:
        config = read_config(design.checkpoint / "config.json")
        for option in ("layers", "taps", "mask_token_id"):
            if (asked := getattr(design, option)) is not None:
                name = option.replace("_", "-")
                raise UsageError(
                    f"--{name} is {asked}, but {design.checkpoint} determines it: leave --{name} out"
                )
        config = _of_kind(config, design, target_config)
        if design.block_size is not None:
            config = {**config, "block_size": design.block_size}
            config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k != "block_size"}
    else:
        layers = target_config.num_hidden_layers
        taps = list(design.taps or drafters.default_taps(layers))
        if max(taps) >= layers:
            raise UsageError(f"--taps has layer {max(taps)}, but the target has layers 0 to {layers - 1}")
        mask = design.mask_token_id
        if mask is None:
            mask = drafters.default_mask_token(Tokenizer(target), target_config)
        config = drafters.new_config(
            target_config,
            layers=design.layers or 2,
            taps=taps,
            block_size=design.block_size or 8,
            mask_token_id=mask,
        )
        if design.kind == "dflash2":
            config = drafters.dflash2_config(config)
    same_as_before(file, config)
    return config


def _of_kind(config: dict[str, Any], design: Design, target: TargetConfig) -> dict[str, Any]:
    """The configuration of the checkpoint, or that of the DFlash2 drafter that begins with it."""
    architecture = config["architectures"][0]
    if design.kind == "dflash2" and architecture == "DFlashDraftModel":
        return drafters.dflash2_config(config, target.embedding_scale)
    if design.kind is not None and architecture != _ARCHITECTURES[design.kind]:
        raise UsageError(
            f"--kind is {design.kind}, but {design.checkpoint} has the architecture {architecture}"
        )
    return config


def _draft_vocabulary(
    file: Path, design: Design, answers: Sequence[Answer], config: TargetConfig
) -> list[int] | None:
    """The tokens that may be drafted. A run keeps those of its first call, though answers may be added."""
    if design.draft_vocabulary is None:
        if file.exists():
            raise UsageError(f"{file}: this run has a draft vocabulary: give --draft-vocabulary as before")
        return None
    if not file.exists():
        texts = (answer.answer_ids for answer in answers)
        tokens = most_frequent(texts, design.draft_vocabulary, config.vocab_size, config.eos_token_ids)
        write_object(file, {"tokens": tokens})
    tokens = read_draft_vocabulary(file, config.vocab_size)
    if len(tokens) != min(design.draft_vocabulary, config.vocab_size):
        raise UsageError(
            f"--draft-vocabulary is {design.draft_vocabulary}, but {file} has {len(tokens)} tokens"
        )
    return tokens
