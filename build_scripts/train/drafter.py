"""Drafter training data and loss: random anchors in the target's own answers (arXiv 2602.06036, section 4.2).

A row holds several whole sequences, back to back, with the target's features of each token. Every epoch draws new
anchors among the answer tokens of the row. A block is the anchor and seven masks; it sees the features of its own
sequence strictly before the anchor and the rows of its own block, nothing else. One block in five is trained
shorter than the block size, so that a shorter block works at run time as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from build_scripts.train.export import MASK
from build_scripts.train.generate import Response, cross_entropy
from build_scripts.train.model import Drafter, Target

GAMMA = 4.0
SHORTER_BLOCKS = 0.2


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed sequences. features: [N, S, taps * D] BF16; the others [N, S] int64.

    sequence: which sequence of its row a token belongs to, -1 for padding; position: within that sequence;
    remaining: answer tokens from this one to the end of its answer, itself included, 0 outside of answers.
    """

    features: Tensor
    tokens: Tensor
    sequence: Tensor
    position: Tensor
    remaining: Tensor


def pack(responses: list[Response], length: int) -> Rows:
    rows: list[list[Response]] = []
    room = 0
    for response in responses:
        size = len(response.tokens)
        if size > length:
            continue
        if size > room:
            rows.append([])
            room = length
        rows[-1].append(response)
        room -= size
    width = responses[0].features.shape[1]
    features = torch.zeros(len(rows), length, width, dtype=torch.bfloat16)
    tokens, position, remaining = (torch.zeros(len(rows), length, dtype=torch.int64) for _ in range(3))
    sequence = torch.full((len(rows), length), -1)
    for row, held in enumerate(rows):
        at = 0
        for number, response in enumerate(held):
            size, first = len(response.tokens), response.prompt_length
            features[row, at : at + size - 1] = response.features
            tokens[row, at : at + size] = torch.tensor(response.tokens)
            sequence[row, at : at + size] = number
            position[row, at : at + size] = torch.arange(size)
            remaining[row, at + first : at + size] = torch.arange(size - first, 0, -1)
            at += size
    return Rows(features, tokens, sequence, position, remaining)


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows with A anchors each, blocks of K: features [B, S, taps * D], the position of each, and per block row
    tokens and positions [B, A * K], the mask [B, 1, A * K, S + A * K], labels and loss weights [B, A, K]."""

    features: Tensor
    context_positions: Tensor
    tokens: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor
    weights: Tensor


def draw(rows: Rows, chosen: Tensor, anchors: int, size: int, generator: torch.Generator) -> Batch:
    """A batch of the chosen rows, with fresh anchors."""
    tokens, sequence, position = rows.tokens[chosen], rows.sequence[chosen], rows.position[chosen]
    remaining = rows.remaining[chosen]
    count, length = tokens.shape
    eligible = (remaining > 1).float()
    anchor = torch.multinomial(eligible, anchors, replacement=True, generator=generator)  # [B, A]
    offsets = torch.arange(size)
    at = (anchor[..., None] + offsets).clamp(max=length - 1)  # [B, A, K]
    inside = offsets < remaining.gather(1, anchor)[..., None]
    labels = tokens.gather(1, at.flatten(1)).view(count, anchors, size)
    lengths = torch.where(
        torch.rand(count, anchors, generator=generator) < SHORTER_BLOCKS,
        torch.randint(2, size, (count, anchors), generator=generator),
        size,
    )
    present = offsets < lengths[..., None]
    weights = torch.exp(-(offsets - 1) / GAMMA) * inside * present
    weights[..., 0] = 0
    block = torch.where(offsets == 0, labels, MASK)
    positions = position.gather(1, anchor)[..., None] + offsets
    of_block = sequence.gather(1, anchor)  # [B, A]
    sees_context = (sequence[:, None] == of_block[..., None]) & (
        torch.arange(length) < anchor[..., None]
    )  # [B, A, S]
    sees_block = torch.eye(anchors, dtype=torch.bool)[None, :, None, :, None] & present[:, None, None]
    mask = torch.cat(
        (
            sees_context[:, :, None].expand(-1, -1, size, -1).flatten(1, 2),
            sees_block.expand(-1, -1, size, -1, -1).flatten(3).flatten(1, 2),
        ),
        -1,
    )
    context = rows.features[chosen]
    return Batch(context, position, block.flatten(1), positions.flatten(1), mask[:, None], labels, weights)


def batches(rows: Rows, count: int, anchors: int, size: int, seed: int, device: str) -> Iterator[Batch]:
    """Endless batches, in a new order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows.tokens), generator=generator)
        for chosen in order.split(count):
            if len(chosen) == count:
                made = draw(rows, chosen, anchors, size, generator)
                yield Batch(*(getattr(made, name).to(device) for name in Batch.__slots__))


def drafter_loss(target: Target, drafter: Drafter, batch: Batch) -> Tensor:
    """Cross entropy at the masked places, weighted exp(-(k - 1) / gamma); embedding and head are the target's."""
    hidden = drafter(
        batch.features,
        batch.context_positions,
        target.embed_tokens(batch.tokens),
        batch.positions,
        batch.mask,
    )
    hidden = hidden.unflatten(1, batch.labels.shape[1:])[:, :, 1:]
    return cross_entropy(
        target.head(hidden), batch.labels[..., 1:].contiguous(), batch.weights[..., 1:].contiguous()
    )
