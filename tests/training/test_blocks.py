"""A training batch: masks and labels of blocks, and the loss with its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask, flex_attention

from dflash_trt.checkpoint.schema import LayerAttention
from dflash_trt.training.blocks import Blocks, draw_blocks, head_loss, weights_of
from dflash_trt.training.model import attend, dense_mask, flex_mask, visible


def plain_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    teacher: Tensor | None = None,
    share: float = 0.0,
) -> Tensor:
    """The result of head_loss, computed directly."""
    logits = F.linear(hidden, head).float()
    flat = logits.flatten(0, 1)
    losses = F.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape) * valid
    weights = weights_of(losses, valid)
    if teacher is not None:
        wanted = F.linear(teacher, head).float().flatten(0, 1).softmax(-1)
        soft = F.cross_entropy(flat, wanted, reduction="none").view(labels.shape) * valid
        losses = (1 - share) * losses + share * soft
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)


KINDS = [LayerAttention(causal, window) for causal in (False, True) for window in (None, 5)]
MASK, SIZE = 999, 4


def drawn(anchors: int = 6, seed: int = 0, shorter: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Blocks]:
    """Three sequences: a long answer, one of three tokens, and one without a position for an anchor."""
    tokens = torch.arange(3 * 20).view(3, 20)
    first, ends = torch.tensor([4, 10, 7]), torch.tensor([20, 13, 8])
    made = draw_blocks(
        tokens,
        first,
        ends,
        anchors=anchors,
        size=SIZE,
        mask_token_id=MASK,
        shorter=shorter,
        generator=torch.Generator().manual_seed(seed),
    )
    return tokens, first, ends, made


def sees(kind: LayerAttention, blocks: Blocks, context: int, row: int, query: int, key: int) -> bool:
    """The rule again, one pair at a time, as in decoding."""
    block, place = divmod(query, SIZE)
    anchor, length = int(blocks.anchors[row, block]), int(blocks.lengths[row, block])
    if key >= context:
        other, other_place = divmod(key - context, SIZE)
        if (other, other_place) == (block, place):
            return True
        if other != block or other_place >= length:
            return False
        position = anchor + other_place
    else:
        position = key
        if key >= anchor:
            return False
    if anchor < 0:
        return False
    mine = anchor + place
    if kind.causal and position > mine:
        return False
    return kind.window is None or abs(position - mine) < kind.window


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_sees_what_it_would_see_while_decoding(kind: LayerAttention) -> None:
    tokens, _, _, blocks = drawn()
    context = tokens.shape[1]
    mask = dense_mask(kind, blocks.anchors, blocks.lengths, context, SIZE)[:, 0]
    batch, rows, keys = mask.shape
    expected = [
        [[sees(kind, blocks, context, b, q, k) for k in range(keys)] for q in range(rows)]
        for b in range(batch)
    ]
    assert mask.tolist() == expected
    assert mask.any(-1).all()  # no row of the softmax is empty
    rule = visible(kind, blocks.anchors, blocks.lengths, context, SIZE)
    assert torch.equal(create_mask(rule, batch, 1, rows, keys, device="cpu")[:, 0], mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", KINDS)
def test_flex_attention_computes_what_the_dense_mask_does(kind, monkeypatch) -> None:
    tokens, _, _, blocks = drawn()
    generator = torch.Generator().manual_seed(1)
    rows, context = blocks.tokens.shape[1], tokens.shape[1]
    q = torch.randn(3, 4, rows, 16, generator=generator)
    k, v = (torch.randn(3, 2, context + rows, 16, generator=generator) for _ in range(2))
    # Uncompiled, as a CPU needs it.
    monkeypatch.setattr("dflash_trt.training.model._compiled", lambda: flex_attention)
    sparse = attend(q, k, v, flex_mask(kind, blocks.anchors, blocks.lengths, context, SIZE))
    dense = attend(q, k, v, dense_mask(kind, blocks.anchors, blocks.lengths, context, SIZE))
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-5)


def test_anchors_are_drawn_once_each_and_leave_something_to_predict() -> None:
    for seed in range(20):
        tokens, first, ends, blocks = drawn(seed=seed)
        for row in range(3):
            anchors = [a for a in blocks.anchors[row].tolist() if a >= 0]
            assert len(set(anchors)) == len(anchors) == min(6, max(0, int(ends[row] - first[row]) - 1))
            assert all(first[row] <= anchor < ends[row] - 1 for anchor in anchors)
        rows = blocks.tokens.view(3, -1, SIZE)
        assert (rows[..., 1:] == MASK).all()
        for row, block in (blocks.anchors >= 0).nonzero().tolist():
            anchor, length = int(blocks.anchors[row, block]), int(blocks.lengths[row, block])
            assert int(rows[row, block, 0]) == int(tokens[row, anchor])
            for place in range(SIZE):
                counts = 0 < place < length and anchor + place < ends[row]
                assert bool(blocks.valid[row, block, place]) == counts
                if counts:
                    assert int(blocks.labels[row, block, place]) == int(tokens[row, anchor + place])
        assert not blocks.valid[blocks.anchors < 0].any()


def test_some_blocks_are_shorter() -> None:
    lengths = torch.cat([drawn(seed=seed, shorter=0.5)[3].lengths.flatten() for seed in range(50)])
    assert set(lengths.tolist()) == {2, 3, 4}
    assert 0.4 < float((lengths < SIZE).float().mean()) < 0.6
    assert (drawn(shorter=0.0)[3].lengths == SIZE).all()


def loss_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(10, SIZE, 8, generator=generator)
    head = torch.randn(50, 8, generator=generator)
    labels = torch.randint(0, 50, (10, SIZE), generator=generator)
    lengths = torch.randint(1, SIZE + 1, (10, 1), generator=generator)
    place = torch.arange(SIZE)
    return hidden, head, labels, (place > 0) & (place < lengths)


@pytest.mark.parametrize(("chunk", "share"), [(1, 0.0), (3, 0.0), (64, 0.0), (3, 0.3), (10, 1.0)])
def test_the_loss_in_chunks_has_the_value_and_gradient_of_the_plain_one(chunk: int, share: float) -> None:
    hidden, head, labels, valid = loss_inputs()
    teacher = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1)) if share else None
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, rows = head_loss(one, head, labels, valid, chunk, teacher, share)
    expected = plain_loss(other, head, labels, valid, teacher, share)
    (2 * loss).backward()
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(one.grad, other.grad)
    of_labels = F.cross_entropy((hidden @ head.T)[valid], labels[valid], reduction="none")
    torch.testing.assert_close(rows[valid], of_labels)
    assert (rows[~valid] == 0).all()


def test_a_batch_without_anything_to_predict_has_no_loss() -> None:
    hidden, head, labels, valid = loss_inputs()
    hidden.requires_grad_()
    loss, _ = head_loss(hidden, head, labels, valid & False)
    loss.backward()
    assert loss.item() == 0
    assert (hidden.grad == 0).all()


def test_dpace_weights_are_the_gradients_of_the_expected_length() -> None:
    losses = torch.tensor([[0.0, 0.1, 2.0, 0.5], [0.0, 1.0, 3.0, 3.0]])
    valid = torch.tensor([[False, True, True, True], [False, True, False, False]])
    p = 0.5 * torch.exp(-losses) + 0.5
    first, second, third = p[0, 1], p[0, 1] * p[0, 2], p[0, 1] * p[0, 2] * p[0, 3]
    expected = torch.tensor([[0.0, first + second + third, second + third, third], [0.0, p[1, 1], 0.0, 0.0]])
    torch.testing.assert_close(weights_of(losses, valid), expected)
