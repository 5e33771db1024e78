"""How a drafter is trained: the recipe, and the drafter that training begins with. Options of `train drafter`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from dflash_trt.checkpoint.draft_vocabulary import LEAST
from dflash_trt.options import Option

Kind = Literal["dflash", "dflash2"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter is trained. Steps are of `batch_size` answers per process, each with up to `anchors` blocks.

    The learning rate rises over the first `warmup` of the steps and falls as a cosine to `floor` of it. `shorter`: the
    share of blocks with fewer rows than the block size. `distill`: the rest of the loss is the answer's token.
    An evaluation has the first `limit` held-out prompts (0: all), with at most `eval_tokens` tokens each. `held_out`
    identifies the prompts of a file; None: they are a share of those of the answers (`hold_out`).
    """

    steps: Annotated[int, Option(metavar="N", least=1, help="number of steps")]
    batch_size: Annotated[int, Option(metavar="N", least=1, help="answers per step and process")] = 8
    anchors: Annotated[int, Option(metavar="N", least=1, help="limit of blocks per answer and step")] = 64
    max_length: Annotated[int, Option(metavar="N", least=4, help="limit of tokens of prompt and answer")] = (
        1024
    )
    distill: Annotated[
        float,
        Option(
            metavar="SHARE",
            most="1",
            help="share of the loss that compares with the target's own distribution, 0 to 1",
        ),
    ] = 0.0
    learning_rate: Annotated[float, Option(metavar="R", help="the highest")] = 6e-4
    seed: Annotated[int, Option(metavar="N", least=0, help="of weights, order and anchors")] = 0
    warmup: float = 0.04
    floor: float = 0.1
    clip: float = 1.0
    shorter: float = 0.2
    limit: int = 32
    eval_tokens: int = 96
    held_out: str | None = None

    def factor(self, step: int) -> float:
        """The factor on the learning rate in step 0, 1, ..."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, self.steps - warm))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class Design:
    """The initial drafter: a checkpoint, or the sizes of a new one. None means the default size."""

    checkpoint: Annotated[
        Path | None,
        Option(
            flag="--from",
            metavar="NAME_OR_PATH",
            parse=str,
            help="a drafter to continue from (default: a new one)",
        ),
    ] = None
    kind: Annotated[
        Kind | None,
        Option(help="default: dflash, or as --from; dflash2 can begin with a DFlash drafter"),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        Option(
            metavar="N",
            least=LEAST,
            help="draft only so many tokens: the end tokens and the most frequent ones of the answers (default: all)",
        ),
    ] = None
    layers: Annotated[
        int | None, Option(metavar="N", least=1, help="layers of a new drafter (default: 2)")
    ] = None
    taps: Annotated[
        Sequence[int] | None,
        Option(
            metavar="L,...",
            least=0,
            help="tapped target layers of a new drafter (default: 5, spread evenly)",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Option(metavar="K", least=2, help="tokens of a block, with the anchor (default: 8, or as --from)"),
    ] = None
    mask_token_id: Annotated[
        int | None,
        Option(metavar="ID", least=0, help="mask token of a new drafter (default: an unused token)"),
    ] = None
