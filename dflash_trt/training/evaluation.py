"""Measure a drafter: tokens per pass by category and position, with this package's own decoding loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.results import Statistics
from dflash_trt.prompts import Prompt
from dflash_trt.reports import plots
from dflash_trt.text.tokenizer import Tokenizer

ALL = "all"
_AT_A_TIME = 8


def measure(
    target: Path,
    drafter: Path,
    prompts: Sequence[Prompt],
    work: Path,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    draft_vocabulary: str | Path | None = None,
) -> dict[str, Any]:
    """Build the pair in `work` and decode with whole blocks. `draft_vocabulary` is that of `build`.

    An answer is shorter than max_tokens where the models' positions end.

    Returns figures per category, and for all under "all":

    acceptance_length: tokens per verification pass.
    acceptance_by_place[i]: share of passes that accepted the draft at position i of the block (from 0).
    tokens, passes: their numbers.
    """
    from dflash_trt.building.build import build
    from dflash_trt.engines.registry import best_here
    from dflash_trt.llm import LLM
    from dflash_trt.models.configs import read_drafter_config, read_target_config

    longest = min(
        read(d).max_position_embeddings
        for read, d in ((read_target_config, target), (read_drafter_config, drafter))
    )
    tokenizer = Tokenizer(target)
    asked = [prompt.token_ids(tokenizer) for prompt in prompts]
    bundle = build(
        str(target),
        str(drafter),
        work / "bundle",
        max_seq_len=min(longest, max(map(len, asked)) + max_tokens),
        engine=best_here().engine,
        draft_vocabulary=draft_vocabulary,
        force=True,
    )
    by_category: dict[str, list[Statistics]] = {}
    with LLM(bundle.path, max_batch_size=_AT_A_TIME, prefix_cache_bytes=0) as llm:
        sampling = [
            SamplingParams(
                max_tokens=max(1, min(max_tokens, longest - len(ids))),
                temperature=temperature,
                seed=seed,
            )
            for seed, ids in enumerate(asked)
        ]
        answers = llm.generate(asked, sampling, block_length=llm.block_size)
    for prompt, answer in zip(prompts, answers, strict=True):
        by_category.setdefault(prompt.category, []).append(answer.statistics)
    shutil.rmtree(work / "bundle")
    figures = {category: _figures(statistics) for category, statistics in sorted(by_category.items())}
    return {**figures, ALL: _figures([s for statistics in by_category.values() for s in statistics])}


def _figures(parts: Sequence[Statistics]) -> dict[str, Any]:
    total = Statistics.merge(parts)
    return {
        "acceptance_length": round(total.mean_acceptance_length, 3),
        "acceptance_by_place": [
            round(count / max(total.num_drafts, 1), 3) for count in total.num_accepted_tokens_per_pos
        ],
        "tokens": total.num_generation_tokens,
        "passes": total.num_drafts,
    }


def average(figures: Mapping[str, Any]) -> float:
    """The mean of the categories' tokens per pass, with equal weights."""
    lengths = [part["acceptance_length"] for category, part in figures.items() if category != ALL]
    return sum(lengths) / len(lengths)


def read_history(file: Path) -> dict[int, dict[str, Any]]:
    """Earlier evaluations: step -> figures. An incomplete line after a kill is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return {entry["step"]: entry["figures"] for entry in map(json.loads, lines)}


def draw_curve(history: Mapping[int, Mapping[str, Any]], file: Path) -> None:
    """Draw the tokens per pass over the steps, a line per category and their mean, if matplotlib is installed.
    history: step -> figures.
    """
    if not plots.available():
        return
    lines: dict[str, list[tuple[float, float]]] = {}
    for step, figures in history.items():
        lengths = {name: part["acceptance_length"] for name, part in figures.items() if name != ALL}
        for name, length in {**lengths, "mean": average(figures)}.items():
            lines.setdefault(name or "others", []).append((step, length))
    plots.plot(file, {"tokens per pass": lines}, title="Held-out prompts, whole blocks", x="training step")
