"""A loss over part of the vocabulary: which tokens it has, and that it is right on average."""

from __future__ import annotations

import pytest
import torch

from dflash_trt.training.answers import Answer
from dflash_trt.training.batches import by_frequency, draw_head
from dflash_trt.training.blocks import head_loss
from tests.training.reference import plain_loss

VOCABULARY, WIDTH = 60, 16


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_tokens_come_in_the_order_of_their_frequency_in_the_answers() -> None:
    answers = [
        Answer("a", "", [9, 9, 9], [4, 2, 4], 0.0, "stop"),
        Answer("b", "", [1], [2, 4], 0.0, "stop"),
    ]
    assert by_frequency(answers, 6).tolist() == [4, 2, 0, 1, 3, 5]  # prompts do not count


def test_labels_and_frequent_tokens_are_always_there_and_others_stand_for_the_rest() -> None:
    frequent = torch.arange(VOCABULARY).flip(0)
    wanted = torch.tensor([7, 3, 7])
    sample = draw_head(wanted, frequent, 20, generator())
    assert sample.ids.tolist() == sorted(set(sample.ids.tolist()))
    assert len(sample.ids) == 20
    certain = {3, 7, *range(50, 60)}
    found = dict(zip(sample.ids.tolist(), sample.bias.exp().tolist(), strict=True))
    assert all(found[token] == 1 for token in certain)
    others = [weight for token, weight in found.items() if token not in certain]
    assert others == pytest.approx([48 / 8] * 8)  # 48 tokens are left, 8 of them were drawn
    assert sample.ids[sample.labels(wanted)].tolist() == wanted.tolist()
    again = [draw_head(wanted, frequent, 20, generator(seed)).ids.tolist() for seed in (0, 1)]
    assert again[0] == sample.ids.tolist() != again[1]


def test_labels_may_be_more_than_were_asked_for() -> None:
    wanted = torch.arange(30)
    sample = draw_head(wanted, torch.arange(VOCABULARY), 10, generator())
    assert sample.ids.tolist() == wanted.tolist()
    assert not sample.bias.any()


def test_the_sum_over_all_tokens_is_right_on_average() -> None:
    logits = torch.randn(VOCABULARY, generator=generator(1))
    frequent, wanted = torch.arange(VOCABULARY), torch.tensor([40])
    sums = []
    for seed in range(2000):
        sample = draw_head(wanted, frequent, 24, generator(seed))
        sums.append((logits[sample.ids] + sample.bias).exp().sum())
    assert torch.stack(sums).mean() == pytest.approx(float(logits.exp().sum()), rel=0.01)


@pytest.mark.parametrize("count", [24, VOCABULARY])
def test_the_loss_is_the_cross_entropy_with_the_weighted_tokens(count: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, WIDTH, requires_grad=True)
    head, labels = torch.randn(VOCABULARY, WIDTH), torch.randint(VOCABULARY, (5, 4))
    valid = torch.rand(5, 4) < 0.8
    valid[:, 0] = False
    sample = draw_head(labels[valid], torch.arange(VOCABULARY), count, generator())
    part = head[sample.ids]
    loss, _ = head_loss(hidden, part, sample.labels(labels), valid, "decay", 2, sample.bias)
    (gradient,) = torch.autograd.grad(loss, hidden)
    # The same by a column of ones for the bias; with all tokens, the loss without a sample.
    wider = torch.cat((hidden, torch.ones(5, 4, 1)), -1)
    expected = plain_loss(
        wider, torch.cat((part, sample.bias[:, None]), 1), sample.labels(labels), valid, "decay"
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, hidden)[0])
    if count == VOCABULARY:
        torch.testing.assert_close(loss, plain_loss(hidden, head, labels, valid, "decay"))
