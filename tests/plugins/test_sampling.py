"""SampleRows in Triton's interpreter gives the host's tokens from the host's noise, bit for bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from dflash_plugins import kernel_specs as uses
from dflash_plugins import launch
from dflash_plugins.kernels import noise, sampling

from dflash_trt.decoding.draft import tree_rows
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.sampling import philox
from dflash_trt.decoding.sampling import probability_mass as weights
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import log_probabilities, sample
from dflash_trt.engines.device.adjusting import Adjusting, takes
from tests.doubles.pool import request
from tests.doubles.triton_interpreter import to_numpy

Logits = np.ndarray[Any, np.dtype[np.float32]]
PARAMS = [
    SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.3, top_k=7), SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.7, top_p=0.95), SamplingParams(temperature=1.0, min_p=0.01, top_p=0.5, top_k=300),
    SamplingParams(temperature=2.0, top_p=0.9999999),
]  # fmt: skip


@triton.jit
def evaluate(bits, values, tokens, position, key0, key1, gumbel, drawn, weight, n, SLOTS: tl.constexpr):
    at = tl.arange(0, SLOTS)
    mask = at < n
    tl.store(gumbel + at, noise.gumbel(tl.load(bits + at, mask=mask).to(tl.uint32, bitcast=True)), mask=mask)
    tl.store(weight + at, noise.weight(tl.load(values + at, mask=mask, other=0.0)), mask=mask)
    token = tl.load(tokens + at, mask=mask, other=0)
    found = noise.token_bits(token, position, key0.to(tl.uint32), key1.to(tl.uint32))
    tl.store(drawn + at, found.to(tl.int32, bitcast=True), mask=mask)


def test_noise_and_weights_are_the_hosts_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    n = 1 << 18
    bits = rng.integers(0, 2**32, n, dtype=np.uint32)
    edges = np.arange(4096, dtype=np.uint32)
    bits[: 4 * 4096] = np.concatenate([edges, ~edges, edges + np.uint32(2**31 - 2048), edges << 20])
    values = (rng.random(n) * -60).astype(np.float32)
    values[:3] = [0, -np.inf, -1e-30]
    tokens = rng.integers(0, 300_000, n)
    seed, position = 2**64 - 5, 2**31 + 7
    gumbel, drawn = torch.empty(n), torch.empty(n, dtype=torch.int32)
    weight = torch.empty(n, dtype=torch.int64)
    arrays = (bits.view(np.int32), values, tokens)
    evaluate[(1,)](
        *map(torch.from_numpy, arrays),
        position,
        seed & 0xFFFFFFFF,
        seed >> 32,
        gumbel,
        drawn,
        weight,
        n,
        SLOTS=n,
    )
    assert np.array_equal(to_numpy(gumbel).view(np.uint32), philox.gumbel_from_bits(bits).view(np.uint32))
    assert np.array_equal(to_numpy(drawn).view(np.uint32), philox.token_bits(seed, position, tokens))
    assert np.array_equal(to_numpy(weight), weights.weight(values))


def check(logits: Logits, params: list[SamplingParams], seed: int = 3) -> None:
    """Compare the kernels' tokens and log-probabilities for logits [len(params), R, V] with the host's."""
    rng = np.random.default_rng(seed)
    seeds = [int(s) for s in rng.integers(0, 2**64, len(params), dtype=np.uint64)]
    positions = rng.integers(0, 2**32, logits.shape[:2])
    tensors = launch.sampling_tensors(params, seeds, "cpu")
    tokens, logprobs = launch.sample_rows(torch.from_numpy(logits), tensors, torch.from_numpy(positions))
    for b, r in np.ndindex(*logits.shape[:2]):
        expected = sample(logits[b, r], params[b], seeds[b], int(positions[b, r]))
        assert tokens[b, r] == expected, (b, r, params[b])
        assert logprobs[b, r].item() == pytest.approx(
            log_probabilities(logits[b, r], expected, 0)[0], abs=2e-5
        )


def gaussian(spread: float, *shape: int) -> Logits:
    return (np.random.default_rng(shape[-1]).standard_normal(shape) * spread).astype(np.float32)


@pytest.mark.parametrize(("vocab", "spread"), [(1, 1.0), (3, 1.0), (1000, 4.0), (4096, 0.3), (9001, 3.0)])
def test_tokens_are_the_hosts(vocab: int, spread: float) -> None:
    check(gaussian(spread, len(PARAMS), 1, vocab), PARAMS)


def test_ties_go_to_the_lower_token() -> None:
    """Few distinct values, so that the limits of top-k and top-p fall among equals, in several tiles."""
    check(np.round(gaussian(1.0, len(PARAMS), 1, 4500)), PARAMS)
    limits = [SamplingParams(temperature=1.0, **limit) for limit in ({"top_p": 0.01}, {"top_k": 2})]
    check(np.zeros((3, 2, 5), np.float32), [SamplingParams(), *limits], seed=5)  # of 3, the last would win


def test_minus_infinity_is_never_drawn() -> None:
    logits = gaussian(2.0, 4, 1, 8500)
    logits[..., 4096:8192] = -np.inf  # a tile of nothing else
    logits[..., ::3] = -np.inf
    check(logits, [PARAMS[0], PARAMS[1], PARAMS[5], SamplingParams(temperature=1.0, top_k=6000)])


def test_rows_of_a_block_have_their_own_positions() -> None:
    check(
        gaussian(0.5, 2, 4, 700), [SamplingParams(temperature=1.0), SamplingParams(temperature=1.5, top_k=50)]
    )


def test_tokens_follow_the_seed_and_not_the_neighbours() -> None:
    logits = torch.from_numpy(np.tile(gaussian(1.0, 1, 1, 3000), (3, 1, 1)))
    params = launch.sampling_tensors([SamplingParams(temperature=1.0)] * 3, [5, 6, 5], "cpu")
    tokens, _ = launch.sample_rows(logits, params, torch.tensor([[9], [9], [9]]))
    assert tokens[0] == tokens[2] != tokens[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_largest_logit_give_no_token(temperature: float) -> None:
    logits = torch.from_numpy(gaussian(1.0, 1, 5, 4200))
    logits[0, 0, 4150] = math.nan
    logits[0, 1, 3] = math.inf
    logits[0, 2] = -math.inf
    logits[0, 3, :4096] = math.nan
    params = launch.sampling_tensors([SamplingParams(temperature=temperature)], [1], "cpu")
    tokens, logprobs = launch.sample_rows(logits, params, torch.arange(5).reshape(1, 5))
    assert tokens[0, :4].tolist() == [-1] * 4
    assert logprobs[0, :4].isnan().all()
    assert tokens[0, 4] == sample(logits[0, 4].numpy(), SamplingParams(temperature=temperature), 1, 4)


def test_sizes_of_the_kernels_are_those_of_their_uses_and_of_the_host() -> None:
    assert sampling.TILE.value == uses.TILE_TOKENS == weights.TILE
    assert sampling.GROUPS.value == uses.TILE_GROUPS
    assert sampling.STEPS.value * sampling.STRIPE.value == sampling.GROUPS.value * sampling.GROUP.value
    assert sampling.GROUPS.value * sampling.GROUP.value == uses.TILE_TOKENS


def adjusted_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Any parameters, of which each is often what changes nothing."""

    def some(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    allowed = rng.choice(vocab, max(2, vocab // 3), replace=False).tolist()
    bias = dict.fromkeys(rng.choice(vocab, 3).tolist(), 1.25)
    return SamplingParams(
        temperature=some(0.0, 0.7, 1.3), top_k=some(0, 20), top_p=some(1.0, 0.8), min_p=some(0.0, 0.05),
        repetition_penalty=some(1.0, 1.3, 0.7), presence_penalty=some(0.0, 1.5), frequency_penalty=some(0.0, 0.3),
        logit_bias=some({}, bias), bad_words=some([], ["x"]), min_tokens=some(0, 9),
        allowed_token_ids=some(None, None, allowed), ignore_eos=True,
    )  # fmt: skip


@pytest.mark.parametrize("trees", [False, True])
def test_adjusted_rows_are_the_hosts(trees: bool) -> None:
    """Several rounds of chains or trees, of which any nodes are accepted, in slots that change their requests. Rounds
    that follow others get nothing of the host but where they begin, and their tokens.
    """
    rng, vocab, most, slots = np.random.default_rng(3 + trees), 700, 4, 3
    device = Adjusting(slots, 200, vocab, most, torch.device("cpu"))
    requests: list[Request] = [None] * slots  # type: ignore[list-item]
    decided = 0
    for step in range(9):
        if not step % 3:
            for slot in range(slots) if not step else [int(rng.integers(slots))]:
                params = adjusted_params(rng, vocab)
                asked = rng.integers(0, 40, int(rng.integers(1, 30))).tolist()
                words = [[7], [3, 9, 8], [5, 6]] if params.bad_words else []
                words = [word for word in words if not trees or len(word) == 1]
                history = History(params, asked, words, [1, 2]) if params.adjusted else None
                requests[slot] = request(asked, params)
                requests[slot].history = history
                requests[slot].output = [int(rng.integers(0, 40))]
                if history is not None:
                    assert takes(history, trees=trees)
                    history.add(requests[slot].output[0])
        nodes = int(rng.integers(1, most + 1))
        tokens = rng.integers(0, 10, (slots, nodes))
        tokens[:, 0] = [each.anchor for each in requests]
        parents = np.tile(np.arange(-1, nodes - 1), (slots, 1))
        if trees:
            parents = np.array([[-1, *(rng.integers(0, i) for i in range(1, nodes))] for _ in range(slots)])
        of_trees = tree_rows(parents)
        start = np.array([len(each.prompt) + len(each.output) - 1 for each in requests])
        positions = torch.from_numpy(start[:, None] + 1 + of_trees["depths"])
        logits = gaussian(2.0, slots, nodes, vocab)
        if not step % 3 or trees:
            device.start(requests, [True] * slots)
        given = torch.from_numpy(logits.copy())
        visible = torch.from_numpy(of_trees["visible"]) if trees else None
        device.apply(given, *map(torch.from_numpy, (tokens, start)), positions, visible, launch.by_triton)
        if step == 8:
            numbers = launch.sampling_tensors([each.params for each in requests], range(slots), "cpu")
            found = launch.sample_rows(given, numbers, positions)[0].numpy()
        for slot, each in enumerate(requests):
            for node in range(nodes):
                path = np.flatnonzero(of_trees["visible"][slot, node])[1:]
                history = copy.deepcopy(each.history)
                for earlier in path if history is not None else ():
                    history.add(int(tokens[slot, earlier]))
                row = logits[slot, node] if history is None else history.adjust(logits[slot, node])
                assert np.array_equal(given[slot, node].numpy(), row), (step, slot, node, each.params)
                decided += 1
                if step == 8:
                    at = int(positions[slot, node])
                    expected = sample(logits[slot, node], each.params, slot, at, history)
                    assert found[slot, node] == expected, (slot, node, each.params)
            last = int(rng.integers(nodes))
            path = np.flatnonzero(of_trees["visible"][slot, last])[1:]
            for token in [*(int(tokens[slot, node]) for node in path), int(rng.integers(10))]:
                each.output.append(token)
                if each.history is not None:
                    each.history.add(token)
    assert decided > 60
