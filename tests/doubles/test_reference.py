"""The oracle agrees with itself, with Transformers' own decoding, and with the paper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.doubles.checkpoints import ENDOFTEXT, IM_END, VOCAB, make_drafter, make_target
from tests.doubles.reference import (
    Drafter,
    accept,
    decode,
    decode_drafting,
    greedy,
    load_target,
    target_outputs,
)

PROMPT = [72, 101, 108, 108, 111, 300, 12, 5, 260]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("oracle")
    make_target(directory / "target", favourites=6, sliding_window=12)
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def drafter(directory: Path, **settings) -> Drafter:
    name = "-".join(f"{key}={value}" for key, value in settings.items())
    return Drafter(make_drafter(directory / f"drafter-{name}", directory / "target", **settings))


def noisy(logits: torch.Tensor, position: int, tokens: list[int]) -> int:
    """Sampling at temperature 1, with noise that depends only on the position."""
    noise = torch.rand(len(logits), generator=torch.Generator().manual_seed(position))
    return int((logits - (-noise.log()).log()).argmax())


@pytest.mark.parametrize("choose", [None, noisy])
@pytest.mark.parametrize("block_length", [None, 1, 3])
def test_drafting_changes_no_token(directory, target, choose, block_length):
    options = {} if choose is None else {"choose": choose}
    plain = decode(target, PROMPT, 40, **options)
    drafted = decode_drafting(target, drafter(directory), PROMPT, 40, block_length=block_length, **options)
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 40
    assert all(len(draft) == (block_length or 8) - 1 for draft in drafted.drafts[:-8])
    if block_length != 1:
        assert 39 <= 1 + sum(count + 1 for count in drafted.accepted) <= 40
    if block_length is None:
        assert len(set(drafted.accepted)) >= 3, "favourites must give rounds of several lengths"


def test_greedy_is_what_transformers_generates(target):
    cached = target.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=40, do_sample=False
    )
    stops = {IM_END, ENDOFTEXT}
    assert decode(target, PROMPT, 40, stop_ids=stops).tokens == cached[0, len(PROMPT) :].tolist()


def test_a_stop_id_ends_both_loops_inside_a_block(directory, target):
    whole = decode_drafting(target, drafter(directory), PROMPT, 40)
    everything, accepted = whole.tokens, whole.accepted
    bonus = set(np.cumsum([0, *(count + 1 for count in accepted)]).tolist())  # the target's own
    first = next(i for i, token in enumerate(everything) if i not in bonus and token not in everything[:i])
    stops = {everything[first]}
    assert (
        decode_drafting(target, drafter(directory), PROMPT, 40, stop_ids=stops).tokens
        == everything[: first + 1]
    )
    assert decode(target, PROMPT, 40, stop_ids=stops).tokens == everything[: first + 1]


def test_accept_takes_the_foreseen_tokens_and_one_more():
    logits = torch.eye(8)[[3, 1, 4, 5]]
    assert accept(logits, [3, 1, 4], [7], greedy) == [3, 1, 4, 5]
    assert accept(logits, [3, 2, 4], [7], greedy) == [3, 1]
    assert accept(logits, [0, 1, 4], [7], greedy) == [3]
    assert accept(logits[:1], [], [7], greedy) == [3]


def test_taps_are_the_outputs_of_the_layers(target):
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, y: outputs.append(y[0])) for layer in target.model.layers
    ]
    _, features = target_outputs(target, PROMPT, taps=(0, 2))
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(features, torch.cat([outputs[0], outputs[2]], -1), rtol=0, atol=0)


def test_the_drafter_attends_as_its_config_says(directory, target):
    """A perturbed row changes exactly the block rows that see it, through one layer."""
    cases = {
        "full": ({}, None, False),
        "sliding is causal unless told": (
            {"layer_types": ("sliding_attention",), "sliding_window": 10},
            10,
            True,
        ),
        "is_causal wins": (
            {"layer_types": ("sliding_attention",), "sliding_window": 10, "is_causal": False},
            10,
            False,
        ),
        "causal in dflash_config": ({"causal_in_dflash_config": True}, None, True),
    }
    rows, size = 12, 8
    torch.manual_seed(0)
    features, block = torch.randn(rows, 128), torch.randn(size, 64)
    for name, (settings, window, causal) in cases.items():
        model = drafter(directory, layers=1, **settings)
        before = model.hidden(features, block)
        for j in range(rows + size):
            changed, other = features.clone(), block.clone()
            if j < rows:
                changed[j] += 1
            else:
                other[j - rows] += 1
            moved = (model.hidden(changed, other) - before).abs().amax(-1) > 1e-6
            for i in range(size):
                p = rows + i
                sees = (not causal or j <= p) and (window is None or abs(p - j) < window)
                assert bool(moved[i]) == (sees or j == p), (name, i, j)


def test_logits_have_order_ten_and_attention_matters(tmp_path):
    target = load_target(make_target(tmp_path))
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    logits, _ = target_outputs(target, tokens)
    assert 8 < logits.abs().max() < 20
    changed, _ = target_outputs(target, [tokens[0] ^ 1, *tokens[1:]])
    assert (changed - logits)[-1].abs().max() > 0.01
