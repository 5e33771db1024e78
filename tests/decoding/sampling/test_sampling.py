"""Sampling: the noise, the kept tokens, and shortcuts that change nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling import philox
from dflash_trt.decoding.sampling import probability_mass as weights
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import log_probabilities, process, rank, sample
from dflash_trt.errors import RequestError

# The known-answer vectors of Random123 1.14 (kat_vectors): counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = st.integers(0, 2**64 - 1)


def words(text: str) -> tuple[Any, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, result: str) -> None:
    k0, k1 = words(key)
    assert philox.philox4x32(words(counter), (k0, k1)) == words(result)
    array = philox.philox4x32_array(np.array([words(counter)] * 3, np.uint32).T, k0 | k1 << 32)
    assert array.T.tolist() == [list(words(result))] * 3


@given(
    SEEDS, st.integers(0, 2**32 - 1), st.sets(st.integers(0, 200_000), min_size=1, max_size=60), st.booleans()
)
@settings(deadline=None)
def test_token_bits_follow_the_definition(seed: int, position: int, chosen: set[int], dense: bool) -> None:
    tokens = np.arange(min(chosen), min(chosen) + len(chosen)) if dense else np.array(sorted(chosen))
    key = seed % 2**32, seed // 2**32
    expected = [philox.philox4x32((v // 4, position, 0, 0), key)[v % 4] for v in tokens.tolist()]
    assert philox.token_bits(seed, position, tokens).tolist() == expected


def every_kind_of_bits() -> np.ndarray[Any, np.dtype[np.uint32]]:
    low = np.arange(4096, dtype=np.uint32)
    half = np.arange(2**31 - 4096, 2**31 + 4096).astype(np.uint32)
    steps = np.uint32(1) << np.arange(32, dtype=np.uint32)
    drawn = np.random.default_rng(1).integers(0, 2**32, 400_000, dtype=np.uint32)
    return np.concatenate([low, ~low, half, steps, ~steps, drawn])


def test_gumbel_is_accurate_and_bounded() -> None:
    bits = every_kind_of_bits()
    noise = philox.gumbel_from_bits(bits)
    exact = -np.log(-np.log1p(-(bits | np.uint32(1)).astype(np.float64) / 2**32))
    unit = np.spacing(np.maximum(np.abs(exact), 1).astype(np.float32))
    assert noise.dtype == np.float32
    assert np.max(np.abs(noise - exact) / unit) < 3
    assert np.max(np.abs(philox.rough_gumbel_from_bits(bits) - exact)) < 1e-4
    assert noise.min() == philox.GUMBEL_MIN
    assert noise.max() == philox.GUMBEL_MAX


def test_gumbel_never_changes() -> None:
    """A published seed gives the same text forever: these bits are part of the interface."""
    noise = philox.gumbel(2**40 + 7, 11, np.array([0, 1, 2, 3, 4, 2_499, 151_935, 2**31]))
    assert [f"{word:08x}" for word in noise.view(np.uint32)] == GOLDEN


def test_weights_are_probabilities_in_whole_numbers() -> None:
    scaled = np.random.default_rng(6).normal(3, 8, 10_001).astype(np.float32)
    scaled[:5000] = -np.inf  # a complete tile of them
    exact = np.exp((scaled - scaled.max()).astype(np.float64)) * 2.0**weights.WEIGHT_BITS
    found = weights.weight(scaled - scaled.max())
    assert found.dtype == np.int64
    assert np.all(np.abs(found - exact) <= 2 + 3e-6 * exact)
    assert weights.total_weight(scaled) == pytest.approx(exact.sum(), rel=3e-6)
    assert weights.total_weight(np.zeros(1, np.float32)) == found.max() == 2**weights.WEIGHT_BITS


def test_weights_never_change() -> None:
    """The set of tokens that top-p keeps is part of a seed's meaning."""
    scaled = np.arange(5000, dtype=np.float32) / -257
    assert weights.total_weight(scaled) == 4423821977294
    assert weights.weight(scaled[[0, 1, 100, 5000 - 1]]).tolist() == [
        17179869184, 17113151488, 11642163200, 61,
    ]  # fmt: skip


GOLDEN = ["3f9e11fd", "402a285b", "403fffdd", "be0498f1", "3ef610b2", "3f3c4e80", "401814fc", "bd05b2a6"]

LOGITS = st.integers(1, 60).flatmap(
    lambda size: st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=size, max_size=size)
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.01, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.6, 1.0]),
)


def naive_kept(logits: np.ndarray[Any, Any], params: SamplingParams, slack: float) -> set[int]:
    """One token at a time, most probable first, lower ids first among equals. `slack` is part of the sum for top-p."""
    scaled = logits / np.float32(params.temperature)
    ranked = sorted(range(len(scaled)), key=lambda v: (-scaled[v], v))
    weight = np.exp((scaled - scaled.max()).astype(np.float64))
    ranked = [v for v in ranked if weight[v] >= params.min_p * (1 - 1e-6)]
    ranked = ranked[: params.top_k or None]
    total, reached, kept = sum(weight[v] for v in ranked), 0.0, set()
    for v in ranked:
        kept.add(v)
        reached += weight[v]
        if params.top_p < 1 and reached >= params.top_p * total * (1 + slack):
            break
    return kept


@given(LOGITS, PARAMS)
@settings(deadline=None, max_examples=200)
def test_process_keeps_what_the_plain_rule_keeps(values: list[float], params: SamplingParams) -> None:
    logits = np.array(values, np.float32)
    processed = process(logits, params)
    kept = set(np.flatnonzero(processed > -np.inf).tolist())
    assert naive_kept(logits, params, -1e-6) <= kept <= naive_kept(logits, params, 1e-6)
    scaled = logits / np.float32(params.temperature)
    assert [processed[v] for v in kept] == [(scaled - scaled.max())[v] for v in kept]


@pytest.mark.parametrize("top_k", [1, 7, 50, 400, 4999])
def test_top_k_of_a_large_vocabulary(top_k: int) -> None:
    logits = np.random.default_rng(top_k).integers(0, 300, 5000).astype(np.float32)  # many ties
    kept = np.flatnonzero(process(logits, SamplingParams(temperature=1.0, top_k=top_k)) > -np.inf)
    assert kept.tolist() == np.sort(np.argsort(-logits, kind="stable")[:top_k]).tolist()


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0])
def test_top_p_of_a_large_vocabulary(top_p: float, spread: float) -> None:
    drawn = np.random.default_rng(3).standard_normal(4000).astype(np.float32)
    logits = np.round(drawn * np.float32(spread), 2)  # many ties
    processed = process(logits, SamplingParams(temperature=1.0, top_p=top_p))
    kept = np.flatnonzero(processed > -np.inf)
    ranked = np.argsort(-logits, kind="stable")
    weight = np.exp((logits - logits.max()).astype(np.float64))
    reached = np.cumsum(weight[ranked]) / weight.sum()
    assert kept.tolist() == np.sort(ranked[: kept.size]).tolist()
    assert reached[kept.size - 1] >= top_p - 1e-6
    assert kept.size == 1 or reached[kept.size - 2] < top_p + 1e-6


@pytest.mark.parametrize("size", [4, 1024])
def test_top_p_stops_where_the_mass_reaches_it_exactly(size: int) -> None:
    for share in (0.25, 0.5, 0.75):
        processed = process(np.zeros(size, np.float32), SamplingParams(temperature=1.0, top_p=share))
        assert np.flatnonzero(processed > -np.inf).tolist() == list(range(int(share * size)))


@given(LOGITS, PARAMS, SEEDS, st.integers(0, 5000))
@settings(deadline=None, max_examples=200)
def test_sample_is_the_argmax_of_processed_logits_and_noise(
    values: list[float], params: SamplingParams, seed: int, position: int
) -> None:
    logits = np.array(values, np.float32)
    noise = philox.gumbel(seed, position, np.arange(logits.size))
    assert sample(logits, params, seed, position) == np.argmax(process(logits, params) + noise)


def test_pruning_is_exact_over_a_wide_range_of_logits() -> None:
    drawn = np.random.default_rng(2)
    for position in range(150):
        logits = (drawn.standard_normal(3000) * drawn.choice([0.0, 0.1, 3, 20])).astype(np.float32)
        params = SamplingParams(temperature=float(drawn.choice([0.05, 1.0, 2.0])))
        noise = philox.gumbel(9, position, np.arange(logits.size))
        assert sample(logits, params, 9, position) == np.argmax(process(logits, params) + noise)


def test_near_ties_are_decided_by_the_exact_noise() -> None:
    """Logits that cancel the noise: all scores are equal except for rounding, so the rough noise cannot decide."""
    tokens = np.arange(2000)
    for position in range(20):
        noise = philox.gumbel(4, position, tokens)
        logits = -noise
        params = SamplingParams(temperature=1.0)
        assert sample(logits, params, 4, position) == np.argmax(process(logits, params) + noise)


def test_samples_follow_the_distribution() -> None:
    """Chi-square with 11 degrees of freedom: beyond 31.3 with probability 0.001. The seed is fixed."""
    logits = np.array([2, 1.5, 1, 1, 0.5, 0, 0, -0.5, -1, -1, -1.5, -2], np.float32)
    params, runs = SamplingParams(temperature=0.8), 10_000
    drawn = [sample(logits, params, 123, position) for position in range(runs)]
    probability = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    difference = np.bincount(drawn, minlength=12) - runs * probability
    assert np.sum(difference**2 / (runs * probability)) < 31.3


def test_noise_is_independent_across_positions_and_tokens() -> None:
    noise = np.stack([philox.gumbel(5, position, np.arange(400)) for position in range(400)])
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.05
    centred = noise - noise.mean()
    for other in (np.roll(centred, 1, axis=0), np.roll(centred, 1, axis=1), centred.T):
        off_diagonal = ~np.eye(400, dtype=bool)
        assert abs((centred * other)[off_diagonal].mean()) < 0.02


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.lists(st.integers(0, 9), max_size=30),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 9), st.floats(-9, 9), max_size=4),
    st.integers(0, 20),
)
def test_adjusted_logits_match_the_formula(
    prompt: list[int],
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    """As in vLLM: the end token (9) is excluded at first, then the bias is added, then the penalties apply."""
    params = SamplingParams(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
        min_tokens=min_tokens,
    )
    history = History(params, prompt, end_tokens=[9])
    for token in output:
        history.add(token)
    logits = np.linspace(-2, 2, 10, dtype=np.float32)
    untouched = logits.copy()
    penalized = history.adjust(logits)
    for v in range(10):
        expected = -math.inf if v == 9 and len(output) < min_tokens else float(logits[v])
        expected += bias.get(v, 0)
        if v in prompt or v in output:
            expected = expected / repetition if expected > 0 else expected * repetition
        expected -= frequency * output.count(v) + presence * (v in output)
        assert penalized[v] == pytest.approx(expected, abs=1e-3)
    assert np.array_equal(logits, untouched)
    assert sample(logits, params, 0, 0, history) == np.argmax(penalized)


def test_counts_grow() -> None:
    history = History(SamplingParams(frequency_penalty=1.0), [])
    for token in range(300):
        history.add(token)
        history.add(token)
    penalized = history.adjust(np.zeros(400, np.float32))
    assert penalized.tolist() == [-2.0] * 300 + [0.0] * 100


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert sample(np.array([0, 3, 1, 3], np.float32), SamplingParams(), 0, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_without_a_largest_one_are_refused(temperature: float, value: float) -> None:
    logits = np.array([0, value, 1], np.float32)
    with pytest.raises(RequestError, match=r"largest.*(nan|inf)"):
        sample(logits, SamplingParams(temperature=temperature), 0, 0)


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.array([-np.inf, 0, -np.inf, 0], np.float32)
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.999)
    assert {sample(logits, params, 1, position) for position in range(50)} == {1, 3}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -1), ("temperature", math.nan),
        ("temperature", 0.001), ("temperature", "hot"), ("top_k", -1), ("top_p", 0), ("top_p", 1.1), ("min_p", -0.1),
        ("min_p", math.inf), ("repetition_penalty", 0), ("presence_penalty", math.nan), ("frequency_penalty", None),
        ("seed", -1), ("seed", 2**64), ("stop", [""]), ("stop", 7), ("stop", [b"x"]), ("stop_token_ids", [-1]),
        ("stop_token_ids", 5), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_params_out_of_range_name_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    shown = value[0] if isinstance(value, list) else value
    assert str(caught.value).startswith(field)
    assert repr(shown) in str(caught.value)
    assert "expected" in str(caught.value)


def test_params_accept_strings_and_lists() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("end",), (1, 2))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert params.greedy
    assert not SamplingParams(presence_penalty=0.1).greedy


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_top_log_probabilities_are_those_of_the_raw_logits(top: int) -> None:
    logits = np.random.default_rng(3).integers(-9, 9, 400).astype(np.float32)  # many ties
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    own, found = log_probabilities(logits, 7, top)
    assert own == pytest.approx(exact[7], abs=1e-4)
    assert [token for token, _ in found] == np.argsort(-logits, kind="stable")[:top].tolist()
    assert [number for _, number in found] == pytest.approx([exact[t] for t, _ in found], abs=1e-4)
    assert [rank(logits, token) for token, _ in found] == [*range(1, top + 1)]
    assert len(log_probabilities(logits[:3], 0, 20)[1]) == 3
