"""Choose the answers of a step from the step's number alone. So a resumed run sees the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_trt.errors import RequestError
from dflash_trt.training.answers import Answer, hashed

_WINDOW = 16  # batches whose answers are grouped by length
_STEP = 32  # T is a multiple of it: torch keeps compiled products of every shape that it has seen


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
        tokens = torch.zeros(len(chosen), -(-max(lengths) // _STEP) * _STEP, dtype=torch.int64)
        for row, (answer, length) in enumerate(zip(chosen, lengths, strict=True)):
            tokens[row, :length] = torch.tensor(answer.token_ids[:length])
        first = torch.tensor([len(answer.prompt_ids) for answer in chosen])
        return Batch(chosen, tokens, first, torch.tensor(lengths))

    def _order(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.answers), generator=generator).tolist()[: self.per_epoch * self.size]
        made: list[list[int]] = []
        for first in range(0, len(order), _WINDOW * self.size):
            window = sorted(
                order[first : first + _WINDOW * self.size], key=lambda i: len(self.answers[i].token_ids)
            )
            made += [window[i : i + self.size] for i in range(0, len(window), self.size)]
        return [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]
