"""A complete training run in a folder: from data and drafter to checkpoints, a curve and a model card.

OUT/checkpoint/     the newest weights            OUT/best/      the weights with the longest acceptance so far
OUT/evaluation.jsonl, OUT/acceptance.svg          OUT/held_out.jsonl  the prompts that it is measured with
OUT/log.jsonl, OUT/recipe.json, OUT/drafter.json, OUT/state/
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import DFlashError, UsageError
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_object
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.drafters.eagle3 import usual_taps
from dflash_trt.prompts import Prompt, read_prompts
from dflash_trt.reports import charts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training import checkpoint as drafters
from dflash_trt.training.answers import read_answers, summary
from dflash_trt.training.batches import Batches
from dflash_trt.training.card import model_card
from dflash_trt.training.dflash2 import DFlash2Drafter
from dflash_trt.training.eagle3 import Eagle3Drafter, start_eagle3
from dflash_trt.training.evaluation import Questions, average, curve, measure, read_history
from dflash_trt.training.held_out import digest, hold_out, write_prompts
from dflash_trt.training.initial import start_from_target
from dflash_trt.training.loop import Recipe, make_accelerator, train
from dflash_trt.training.target import FeatureCache, FrozenTarget, matrix_dtype

# Tokens of a new EAGLE-3 head. Published heads have 32,000, for vocabularies of 128,000 and more.
EAGLE3_VOCABULARY = 8192
_ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "eagle3": "LlamaForCausalLMEagle3",
}


@dataclass(frozen=True, kw_only=True)
class Design:
    """The initial drafter: a checkpoint, or the sizes of a new one. None means the default size.

    kind: of the drafter. A DFlash2 drafter may begin with the checkpoint of a DFlash drafter.
    vocabulary: tokens of the head of an EAGLE-3 drafter, the most frequent ones of the answers.
    """

    kind: drafters.Kind | None = None
    vocabulary: int | None = None
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
    held_out: Path | None = None,
    save_every: int = 50,
    evaluate_every: int | None = 0,
    report: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Train a drafter for the target in `out`, or resume the run there; returns after which step it ended.

    That is recipe.steps, or fewer if the process was asked to end. Prompts of the file `held_out`, or a share of those
    of the answers, are not trained on (held_out.py). The drafter is measured with them before the first step, every
    `evaluate_every` steps and at the end; with None never.

    Raises DFlashError if `out` holds a run with another drafter or recipe, and any error of reading the inputs.
    """
    accelerator = make_accelerator()
    target_config = read_target_config(target)
    config = _drafter_config(out / "drafter.json", target, target_config, design)
    answers = read_answers(data)
    _check_ids(answers, target_config, data)
    answers, prompts = hold_out(answers, held_out, data)
    if held_out is not None:
        recipe = replace(recipe, held_out=digest(prompts))
    _write_beginning(out, config, prompts, accelerator)
    torch.manual_seed(recipe.seed)  # for the weights of a new drafter
    batches = Batches(answers, recipe.batch_size, recipe.max_length, recipe.seed)
    own, kept = config.get("draft_vocab_size"), None
    if own is not None:
        kept = batches.frequent(target_config.vocab_size)[:own].sort().values
    drafter = drafters.open_drafter(out / "beginning", design.checkpoint, target, kept)
    _check_recipe(drafter, recipe)
    if accelerator.is_main_process:
        write_object(out / "drafter.json", config)  # only now does the run have to continue with this drafter
    frozen = _frozen_target(target, target_config, drafter, recipe, accelerator)
    _begin(drafter, frozen, target, target_config, new=design.checkpoint is None)
    counts, measures = summary(batches.answers), evaluate_every is not None
    train(
        *(drafter, frozen, batches, recipe, out, accelerator),
        cache=_feature_cache(features, target_name, target_config, drafter, recipe),
        save_every=save_every,
        evaluate_every=evaluate_every or 0,
        on_weights=_Keeper(
            target, target_name, out, config, recipe, drafter, frozen, counts, measures, report
        ),
        report=report,
    )
    return int(read_object(out / "state" / "state.json")["step"])


def _frozen_target(
    target: Path, config: TargetConfig, drafter: Any, recipe: Recipe, accelerator: Accelerator
) -> FrozenTarget:
    # Without autocast, the drafter computes in float32, and takes nothing else.
    dtype = matrix_dtype(accelerator.device) if accelerator.mixed_precision == "bf16" else torch.float32
    taps = drafter.config.target_layer_ids
    return FrozenTarget(target, config, taps, accelerator.device, dtype, final=recipe.distill > 0)


def _feature_cache(
    folder: Path | None, target: str, config: TargetConfig, drafter: Any, recipe: Recipe
) -> FeatureCache | None:
    if folder is None:
        return None
    taps = list(drafter.config.target_layer_ids)
    key = {"target": target, "taps": taps, "hidden_size": config.hidden_size}
    return FeatureCache(folder, key | ({"final": True} if recipe.distill else {}))


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


@dataclass
class _Keeper:
    """Writes the checkpoint of a step with its card, and measures it with the prompts that are held out."""

    target: Path
    target_name: str
    out: Path
    config: dict[str, Any]
    recipe: Recipe
    drafter: Any
    frozen: FrozenTarget
    counts: dict[str, Any]  # of the answers
    measures: bool
    report: Callable[[dict[str, Any]], None] | None

    def __call__(self, step: int, weights: dict[str, Tensor]) -> None:
        history = read_history(self.out / "evaluation.jsonl")
        published = self.drafter.published(weights, self.frozen.embedding)
        checkpoint = self.out / "checkpoint"
        drafters.write_checkpoint(published, self.config, checkpoint, self._card(step, history))
        if self.measures and all(entry["step"] != step for entry in history):
            self._measure(step, history)

    def _card(self, step: int, history: list[dict[str, Any]]) -> str:
        counts, taps = {**self.counts, "steps": step}, self.drafter.config.target_layer_ids
        return model_card(self.target_name, self.config, taps, self.recipe, counts, history)

    def _measure(self, step: int, history: list[dict[str, Any]]) -> None:
        """Add the step to the history, and keep the checkpoint if it is the best so far."""
        out, report = self.out, self.report
        # Answers may have been added since the run began, but its evaluations have the same prompts.
        asked = read_prompts(out / "held_out.jsonl", self.recipe.limit)
        if report is not None:
            report({"step": step, "measuring": len(asked)})
        questions = Questions(asked, self.recipe.eval_tokens)
        figures = measure(self.target, out / "checkpoint", questions, out / "work")
        best = max((average(entry["figures"]) for entry in history), default=0.0)
        history.append({"step": step, "figures": figures})
        with (out / "evaluation.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(history[-1]) + "\n")
        if charts.available():
            (out / "acceptance.svg").write_text(curve(history), encoding="utf-8")
        (out / "checkpoint" / "README.md").write_text(self._card(step, history), encoding="utf-8")
        if average(figures) > best:
            _replace(out / "checkpoint", out / "best")
        if report is not None:
            report({"step": step, "acceptance_length": round(average(figures), 3), "figures": figures})


def _drafter_config(file: Path, target: Path, target_config: TargetConfig, design: Design) -> dict[str, Any]:
    """config.json of the drafter. If a run exists, it must be the same as that run's."""
    if design.checkpoint is not None:
        config = read_object(design.checkpoint / "config.json")
        for option in ("layers", "taps", "mask_token_id"):
            if (asked := getattr(design, option)) is not None:
                name = option.replace("_", "-")
                raise UsageError(
                    f"--{name} is {asked}, but {design.checkpoint} determines it: leave --{name} out"
                )
        config = _of_kind(config, design)
        if design.block_size is not None:
            config = {**config, "block_size": design.block_size}
            config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if k != "block_size"}
    else:
        kind = design.kind or "dflash"
        layers = target_config.num_hidden_layers
        taps = list(
            design.taps or (usual_taps(layers)[1:] if kind == "eagle3" else drafters.default_taps(layers))
        )
        if max(taps) >= layers:
            raise UsageError(f"--taps has layer {max(taps)}, but the target has layers 0 to {layers - 1}")
        if kind == "eagle3":
            _check_eagle3(design, taps)
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
        config = drafters.kind_fields(
            kind, config, vocabulary=design.vocabulary or EAGLE3_VOCABULARY, taps=taps
        )
    if file.exists() and (before := read_object(file)) != config:
        differing = next(key for key in config | before if config.get(key) != before.get(key))
        raise DFlashError(
            f"{file}: {differing} is {before.get(differing)}, but now {config.get(differing)}; a run continues with "
            "the drafter it began with; choose another --out"
        )
    return config


def _of_kind(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """The configuration of the checkpoint, or that of the DFlash2 drafter that begins with it."""
    architecture = config["architectures"][0]
    if design.kind == "dflash2" and architecture == "DFlashDraftModel":
        return drafters.kind_fields("dflash2", config, vocabulary=0, taps=[])
    if design.kind is not None and architecture != _ARCHITECTURES[design.kind]:
        raise UsageError(
            f"--kind is {design.kind}, but {design.checkpoint} has the architecture {architecture}"
        )
    if architecture == _ARCHITECTURES["dflash2"]:
        raise DFlashError(
            f"{design.checkpoint}: a DFlash2 drafter has no projections to continue from; begin with a DFlash drafter"
        )
    return config


def _check_eagle3(design: Design, taps: Sequence[int]) -> None:
    for option in ("layers", "block_size", "mask_token_id"):
        if (asked := getattr(design, option)) is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is {asked}, but --kind eagle3 has none to choose: leave it out")
    if len(taps) != 3:
        raise UsageError(f"--taps has {len(taps)} layers, but --kind eagle3 has 3")


def _check_recipe(drafter: Any, recipe: Recipe) -> None:
    if not drafter.teacher_forced:
        return
    for option in ("distill", "head_tokens"):
        if asked := getattr(recipe, option):
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is {asked}, but is not for --kind eagle3: leave it out")


def _begin(drafter: Any, frozen: FrozenTarget, target: Path, config: TargetConfig, *, new: bool) -> None:
    """The weights that a new drafter has from its target, and the scale of a new selector."""
    if new and isinstance(drafter, Eagle3Drafter):
        start_eagle3(drafter, Checkpoint(target), config, frozen.head)
    elif new:
        start_from_target(drafter, Checkpoint(target), config)
    if isinstance(drafter, DFlash2Drafter):
        sizes = [
            float(x.detach().float().square().mean().sqrt()) for x in (frozen.embedding, drafter.norm.weight)
        ]
        drafter.scale_selector(*sizes)


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
