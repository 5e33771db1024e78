"""A complete training run in a folder: from data and drafter to checkpoints, a curve and a model card.

OUT/checkpoint/     the newest weights            OUT/best/      the weights with the longest acceptance so far
OUT/evaluation.jsonl, OUT/acceptance.svg          OUT/log.jsonl, OUT/recipe.json, OUT/drafter.json, OUT/state/
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import DFlashError
from dflash_trt.files.reading import read_object
from dflash_trt.models.configs import read_target_config
from dflash_trt.reports import charts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training import checkpoint as drafters
from dflash_trt.training.answers import read_answers, summary
from dflash_trt.training.batches import Batches
from dflash_trt.training.card import model_card
from dflash_trt.training.evaluation import Questions, average, curve, measure, read_history
from dflash_trt.training.initial import start_from_target
from dflash_trt.training.loop import Recipe, make_accelerator, train
from dflash_trt.training.target import FeatureCache, FrozenTarget, matrix_dtype


@dataclass(frozen=True, kw_only=True)
class Design:
    """The initial drafter: a checkpoint, or the sizes of a new one. None means the default size."""

    checkpoint: Path | None = None
    layers: int | None = None
    taps: Sequence[int] | None = None
    block_size: int | None = None
    mask_token_id: int | None = None


def run(
    target: Path,
    target_name: str,
    data: Path,
    out: Path,
    design: Design,
    recipe: Recipe,
    *,
    features: Path | None = None,
    questions: Questions | None = None,
    save_every: int = 50,
    evaluate_every: int = 0,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Train a drafter for the target in `out`, or resume the run there; returns after which step it ended.

    That is recipe.steps, or fewer if the process was asked to end.

    Raises DFlashError if `out` holds a run with another drafter or recipe, and any error of reading the inputs.
    """
    accelerator = make_accelerator()
    target_config = read_target_config(target)
    answers = read_answers(data)
    _check_ids(answers, target_config, data)
    config = _drafter_config(out / "drafter.json", target, target_config, design)
    begin = out / "beginning"
    if accelerator.is_main_process:
        begin.mkdir(parents=True, exist_ok=True)
        (begin / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (out / "drafter.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    accelerator.wait_for_everyone()
    torch.manual_seed(recipe.seed)  # for the weights of a new drafter
    drafter = drafters.open_drafter(begin, design.checkpoint, target)
    if design.checkpoint is None:
        start_from_target(drafter, Checkpoint(target), target_config)
    taps = drafter.config.target_layer_ids
    # Without autocast, the drafter computes in float32, and takes nothing else.
    dtype = matrix_dtype(accelerator.device) if accelerator.mixed_precision == "bf16" else torch.float32
    frozen = FrozenTarget(target, target_config, taps, accelerator.device, dtype, final=recipe.distill > 0)
    key: dict[str, Any] = {
        "target": target_name,
        "taps": list(taps),
        "hidden_size": target_config.hidden_size,
    }
    if recipe.distill:
        key["final"] = True
    cache = None if features is None else FeatureCache(features, key)
    batches = Batches(answers, recipe.batch_size, recipe.max_length, recipe.seed)

    def keep(step: int, weights: dict[str, Tensor]) -> None:
        history = read_history(out / "evaluation.jsonl")
        counts = {**summary(batches.answers), "steps": step}
        card = model_card(target_name, config, recipe, counts, history)
        drafters.write_checkpoint(weights, config, out / "checkpoint", card)
        if questions is None or any(entry["step"] == step for entry in history):
            return
        figures = measure(target, out / "checkpoint", questions, out / "work")
        best = max((average(entry["figures"]) for entry in history), default=0.0)
        history.append({"step": step, "figures": figures})
        with (out / "evaluation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(history[-1]) + "\n")
        if charts.available():
            (out / "acceptance.svg").write_text(curve(history), encoding="utf-8")
        card = model_card(target_name, config, recipe, counts, history)
        (out / "checkpoint" / "README.md").write_text(card, encoding="utf-8")
        if average(figures) > best:
            _replace(out / "checkpoint", out / "best")
        if report is not None:
            report({"step": step, "acceptance_length": round(average(figures), 3), "figures": figures})

    train(
        drafter,
        frozen,
        batches,
        recipe,
        out,
        accelerator,
        cache=cache,
        save_every=save_every,
        evaluate_every=evaluate_every,
        on_weights=keep,
        report=report,
    )
    return int(read_object(out / "state" / "state.json")["step"])


def _drafter_config(file: Path, target: Path, target_config: TargetConfig, design: Design) -> dict[str, Any]:
    """config.json of the drafter. If a run exists, it must be the same as that run's."""
    if design.checkpoint is not None:
        config = read_object(design.checkpoint / "config.json")
        for option in ("layers", "taps", "mask_token_id"):
            if (asked := getattr(design, option)) is not None:
                name = option.replace("_", "-")
                raise DFlashError(
                    f"--{name} is {asked}, but {design.checkpoint} determines it: leave --{name} out"
                )
        if design.block_size is not None:
            config = {**config, "block_size": design.block_size}
            config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k != "block_size"}
    else:
        taps = list(design.taps or drafters.default_taps(target_config.num_hidden_layers))
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
    if file.exists() and (before := read_object(file)) != config:
        differing = next(key for key in config | before if config.get(key) != before.get(key))
        raise DFlashError(
            f"{file}: {differing} is {before.get(differing)}, but now {config.get(differing)}; a run continues with "
            "the drafter it began with; choose another --out"
        )
    return config


def _check_ids(answers: Sequence[Any], config: TargetConfig, data: Path) -> None:
    for answer in answers:
        if (largest := max(answer.token_ids)) >= config.vocab_size:
            raise DFlashError(
                f"{data}: answer {answer.id} has token {largest}, but the target embeds {config.vocab_size}: the "
                "answers are of another target"
            )


def _replace(source: Path, place: Path) -> None:
    work = place.with_name(f".{place.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(source, work)
    shutil.rmtree(place, ignore_errors=True)
    work.rename(place)
