"""What a step trains on: a batch of the target's answers, anchors of blocks in them, and the loss (paper, section 4.2).

The step's number alone chooses the answers. So a resumed run sees the same batches.

A block is an anchor and K - 1 mask tokens at the following positions. Row j predicts the token at its own position.
Positions after the end of the answer have no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_trt.errors import RequestError
from dflash_trt.training.answers import Answer, hashed

_WINDOW = 16  # batches whose answers are grouped by length
# T is a multiple of it: torch keeps compiled products of every shape that it has seen.
_WIDTH_STEP = 32
_DPACE_SMOOTHING = 0.5
# On CPUs, oneDNN keeps a compiled product for each of the last 1,024 shapes, 3 to 5 MB each.
_STEP = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """B answers with their prompts, padded to T: tokens [B, T]; first, ends [B]: an answer is tokens[first:ends]."""

    answers: tuple[Answer, ...]
    tokens: Tensor
    first: Tensor
    ends: Tensor


class Batches:
    """Answers in batches of similar length. Every epoch has a new order.

    A prompt with its answer is cut at `max_length` tokens. An answer with fewer than two tokens before the cut is
    left out.

    Raises RequestError if there are fewer answers than a batch needs.
    """

    def __init__(self, answers: Sequence[Answer], size: int, max_length: int, seed: int) -> None:
        in_order = sorted(answers, key=lambda answer: hashed(answer.id, "order"))  # not that of completion
        self.answers = [a for a in in_order if min(len(a.token_ids), max_length) - len(a.prompt_ids) >= 2]
        self.size, self.max_length, self.seed = size, max_length, seed
        if len(self.answers) < size:
            raise RequestError(
                f"only {len(self.answers)} answers have two tokens or more within {max_length} tokens with their "
                f"prompts, but a step needs {size}: regenerate more, or lower --batch-size"
            )
        self.per_epoch = len(self.answers) // size
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __call__(self, step: int) -> Batch:
        """The batch of step 0, 1, ..."""
        epoch, place = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        chosen = tuple(self.answers[i] for i in self._epoch[1][place])
        lengths = [min(len(answer.token_ids), self.max_length) for answer in chosen]
        tokens = torch.zeros(len(chosen), -(-max(lengths) // _WIDTH_STEP) * _WIDTH_STEP, dtype=torch.int64)
        for row, (answer, length) in enumerate(zip(chosen, lengths, strict=True)):
            tokens[row, :length] = torch.tensor(answer.token_ids[:length])
        first = torch.tensor([len(answer.prompt_ids) for answer in chosen])
        return Batch(chosen, tokens, first, torch.tensor(lengths))

    def _order(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.answers), generator=generator).tolist()[: self.per_epoch * self.size]
        batches: list[list[int]] = []
        for first in range(0, len(order), _WINDOW * self.size):
            window = sorted(
                order[first : first + _WINDOW * self.size], key=lambda i: len(self.answers[i].token_ids)
            )
            batches += [window[i : i + self.size] for i in range(0, len(window), self.size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a batch of B sequences: A blocks of K rows per sequence.

    anchors [B, A]: positions; -1 if a sequence has fewer anchors.
    lengths [B, A]: rows of each block.
    tokens, positions [B, A * K]: of the block rows. All rows but the anchor hold the mask token.
    labels [B, A, K].
    valid bool [B, A, K]: rows that count.
    """

    anchors: Tensor
    lengths: Tensor
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    valid: Tensor


def draw_blocks(
    tokens: Tensor,
    first: Tensor,
    ends: Tensor,
    *,
    anchors: int,
    size: int,
    mask_token_id: int,
    shorter: float,
    generator: torch.Generator,
) -> Blocks:
    """Draw up to `anchors` positions without replacement in each answer.

    tokens [B, T]; an answer is tokens[first:ends] (both [B]). An anchor is a token of the answer that another one
    follows. `shorter` is the share of blocks with a random number of rows from 2 to `size` - 1. With them, blocks
    that decoding shortens are as good as blocks trained at that length.
    """
    batch, width = tokens.shape
    device = tokens.device
    place = torch.arange(width, device=device)
    eligible = (place >= first[:, None]) & (place < ends[:, None] - 1)
    order = torch.rand(batch, width, generator=generator).to(device).masked_fill(~eligible, -1.0)
    score, anchor = order.topk(min(anchors, width), dim=1)
    anchor = torch.where(score >= 0, anchor, -1)
    lengths = torch.full(anchor.shape, size)
    if size > 2:
        cut = torch.rand(anchor.shape, generator=generator) < shorter
        some = torch.randint(2, size, anchor.shape, generator=generator)
        lengths = torch.where(cut, some, lengths)
    lengths = lengths.to(device)
    offsets = torch.arange(size, device=device)
    at = anchor.clamp(min=0)[..., None] + offsets
    labels = tokens.gather(1, at.clamp(max=width - 1).flatten(1)).view(*anchor.shape, size)
    inside = (at < ends[:, None, None]) & (offsets < lengths[..., None]) & (anchor >= 0)[..., None]
    rows = torch.where(offsets == 0, labels, mask_token_id)
    return Blocks(anchor, lengths, rows.flatten(1), at.flatten(1), labels, inside & (offsets > 0))


def weights_of(losses: Tensor, valid: Tensor) -> Tensor:
    """The weight of each row's loss, from losses and valid, [N, K] with row 0 the anchor. Has no gradient.

    It is the influence of row j on the accepted tokens, by the drafter's own probabilities: the sum, over all m >= j,
    of the product of the first m smoothed probabilities (D-PACE, arXiv 2605.18810).
    """
    smooth = (1 - _DPACE_SMOOTHING) * torch.exp(-losses.detach()) + _DPACE_SMOOTHING
    reach = torch.where(valid, smooth, 1.0).cumprod(1) * valid
    return reach.flip(1).cumsum(1).flip(1) * valid


def _logits(rows: Tensor, head: Tensor) -> Tensor:
    """Float32 [n, V] of rows [n, D]. Rows of zeros fill up to a multiple of _STEP, so that products have few shapes."""
    return F.linear(F.pad(rows.to(head.dtype), (0, 0, 0, -len(rows) % _STEP)), head)[: len(rows)].float()


class _Given(torch.autograd.Function):
    """A value whose gradient to `hidden` is known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * scale, None, None


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    chunk: int = 16,
    teacher: Tensor | None = None,
    share: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The mean weighted loss, and the cross entropy of every row's label.

    The gradient is computed together with the loss, a chunk of blocks at a time. So only the logits of one chunk are
    held, and none are computed twice.

    hidden [N, K, D]: normed rows of N blocks. head [V, D]: the target's, frozen; products are in its dtype.
    labels, valid [N, K]. `chunk`: blocks whose logits, [chunk * K, V] in float32, are held at a time.
    teacher [N, K, D]: the target's normed rows that predict the labels. With them, `share` of the wanted distribution
        is the target's, and the rest the label. Weights depend on the labels alone.
    Returns a scalar with gradient to `hidden`, and float32 [N, K] without one.
    """
    gradient, losses = torch.zeros_like(hidden), torch.zeros(valid.shape, device=hidden.device)
    total = weight = torch.zeros((), device=hidden.device)
    for first in range(0, len(hidden), chunk):
        part = slice(first, first + chunk)
        mask = valid[part]
        with torch.enable_grad():
            rows = hidden[part].detach()[mask].requires_grad_()
            logits = _logits(rows, head)
            loss = F.cross_entropy(logits, labels[part][mask], reduction="none")
            losses[part][mask] = loss.detach()
            scale = weights_of(losses[part], mask)[mask]
            if teacher is not None:
                wanted = _logits(teacher[part][mask], head).softmax(-1)
                loss = (1 - share) * loss + share * F.cross_entropy(logits, wanted, reduction="none")
            weighted = (loss * scale).sum()
            if hidden.requires_grad:
                gradient[part][mask] = torch.autograd.grad(weighted, rows)[0]
        total, weight = total + weighted.detach(), weight + scale.sum()
    weight = weight.clamp(min=1e-6)
    return _Given.apply(hidden, total / weight, gradient / weight), losses
