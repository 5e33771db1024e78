"""How answers are made and a drafter is trained: options of `train`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash_trt.checkpoint.draft_vocabulary import LEAST
from dflash_trt.options import option

if TYPE_CHECKING:
    from dflash_trt.decoding.params import SamplingParams

Kind = Literal["dflash", "dflash2"]
# Rates of Muon, for a new drafter and one that goes on. New ones of `tiny` gave 2.28 tokens per pass after 120 steps,
# and 1.67 with AdamW at the best of 0.0006, 0.002 and 0.004; SmolLM2-135M had losses of 5.11 and 6.14 after 80.
NEW_RATE, FURTHER_RATE = 1e-2, 1e-3


@dataclass(frozen=True)
class AnswerSampling:
    """How answers are sampled. A prompt's id selects its temperature and its seed."""

    max_tokens: int = option("limit of tokens per answer", "N", least=2, default=256)
    temperatures: Sequence[float] = option("temperatures; each prompt gets one", "T,...", default=(0.0, 0.7))
    top_p: float = option("top-p if the temperature is not 0", "P", default=1.0)
    seed: int = option("seed of sampling", "N", least=0, default=0)

    def of(self, prompt_id: str, room: int | None = None) -> SamplingParams:
        """The parameters of a prompt's answer, which has `room` tokens at most."""
        from dflash_trt.decoding.params import SamplingParams  # slow to import
        from dflash_trt.training.answers import hashed

        temperature = self.temperatures[hashed(prompt_id, "temperature") % len(self.temperatures)]
        return SamplingParams(
            max_tokens=self.max_tokens if room is None else min(self.max_tokens, room),
            temperature=temperature,
            top_p=self.top_p if temperature > 0 else 1.0,
            seed=hashed(prompt_id, str(self.seed)),
        )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter is trained. Steps are of `batch_size` answers per process, each with up to `anchors` blocks.

    The learning rate rises over the first `warmup` of the steps and falls as a cosine to `floor` of it. `shorter`: the
    share of blocks with fewer rows than the block size. `distill`: the rest of the loss is the answer's token.
    An evaluation has the first `limit` held-out prompts (0: all), with at most `eval_tokens` tokens each. `held_out`
    identifies the prompts of a file; None: they are a share of those of the answers (`hold_out`).
    """

    steps: int = option("number of steps", "N", least=1)
    batch_size: int = option("answers per step and process", "N", least=1, default=8)
    anchors: int = option("limit of blocks per answer and step", "N", least=1, default=64)
    max_length: int = option("limit of tokens of prompt and answer", "N", least=4, default=1024)
    distill: float = option(
        "share of the loss that compares with the target's own distribution, 0 to 1", "SHARE", most="1", default=0.0
    )  # fmt: skip
    learning_rate: float | None = option(
        "of matrices, by Muon, the highest; a tenth for the rest (default: 0.01, or 0.001 with --from)",
        "R",
        parse=float,
        default=None,
    )
    seed: int = option("of weights, order and anchors", "N", least=0, default=0)
    warmup: float = 0.04
    floor: float = 0.1
    clip: float = 1.0
    shorter: float = 0.2
    limit: int = 32
    eval_tokens: int = 96
    held_out: str | None = None

    def rate(self, step: int) -> float:
        """The learning rate of matrices in step 0, 1, ..."""
        return (self.learning_rate or NEW_RATE) * self._factor(step)

    def _factor(self, step: int) -> float:
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, self.steps - warm))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class Design:
    """The initial drafter: a checkpoint, or the sizes of a new one. None means the default size."""

    checkpoint: Path | None = option(
        "a drafter to continue from (default: a new one)", "NAME_OR_PATH", flag="--from", parse=str, default=None
    )  # fmt: skip
    kind: Kind | None = option("default: dflash, or as --from; dflash2 can begin with either", default=None)
    draft_vocabulary: int | None = option(
        "draft only so many tokens: the end tokens and the most frequent ones of the answers (default: all)",
        "N",
        least=LEAST,
        default=None,
    )
    layers: int | None = option("layers of a new drafter (default: 2)", "N", least=1, default=None)
    taps: Sequence[int] | None = option(
        "tapped target layers of a new drafter (default: 5, spread evenly)", "L,...", least=0, default=None
    )
    block_size: int | None = option(
        "tokens of a block, with the anchor (default: 8, or as --from)", "K", least=2, default=None
    )
    mask_token_id: int | None = option(
        "mask token of a new drafter (default: an unused token)", "ID", least=0, default=None
    )
