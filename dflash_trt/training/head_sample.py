"""Part of the vocabulary, for the loss: logits of all tokens take most of the time of a small target's drafter.

The loss of a row is log(sum of exp over all tokens) less the label's logit. Here the sum has the tokens that matter
most, and a sample of the others, drawn anew in each step. Each token of the sample counts for as many as it stands for
(sampled softmax, arXiv 1412.2007, with uniform draws). Decoding has all tokens as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.training.answers import Answer


@dataclass(frozen=True, slots=True)
class HeadSample:
    """ids [N]: tokens in ascending order. bias [N]: float32, log of how many tokens each of them stands for."""

    ids: Tensor
    bias: Tensor

    def labels(self, tokens: Tensor) -> Tensor:
        """Where `tokens` are in ids; those that are not there get some place or other."""
        return torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)


def by_frequency(answers: Sequence[Answer], vocabulary: int) -> Tensor:
    """All token ids, those first that are most frequent in the answers; int64 [vocabulary]."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer.answer_ids), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)


def draw_head(wanted: Tensor, frequent: Tensor, count: int, generator: torch.Generator) -> HeadSample:
    """`count` tokens: all of `wanted`, then the first of `frequent` up to half of them, then others by chance.

    wanted [n]: labels of the step, with repetitions. frequent [V]: all tokens, of by_frequency. There are more than
    `count` where `wanted` alone needs it, and at most V.
    """
    kept = torch.zeros(len(frequent), dtype=torch.bool)
    kept[frequent[: count // 2]] = True
    kept[wanted.cpu()] = True
    others = (~kept).nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others), generator=generator)[: max(0, count - int(kept.sum()))]]
    bias = torch.zeros(len(frequent))
    if len(drawn):
        bias[drawn] = torch.tensor(len(others) / len(drawn)).log()
    kept[drawn] = True
    ids = kept.nonzero().squeeze(1)
    return HeadSample(ids.to(wanted.device), bias[ids].to(wanted.device))
