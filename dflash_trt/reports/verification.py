"""Check that drafting does not change the tokens: every prompt with and without it, and the first difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, zip_longest
from typing import Any

import numpy as np

from dflash_trt.decoding.params import DraftingOptions, RequestOptions, SamplingParams
from dflash_trt.decoding.results import Completion, Statistics
from dflash_trt.decoding.sampling.philox import gumbel_from_bits, token_bits
from dflash_trt.decoding.sampling.sampler import process
from dflash_trt.llm import LLM
from dflash_trt.prompts import Prompt

# Sampled tokens are compared at this top-p. Prompt i has seed i.
TOP_P = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two token sequences differ. A token is None if its sequence has ended.

    margin: how far the plain token is ahead of the drafted one, with the noise of its temperature, as a share of the
    root mean square of the centred logits. None if a token is excluded by top-p, or its sequence has ended.
    """

    prompt_id: str
    position: int
    plain_token: int | None
    drafted_token: int | None
    plain_text: str | None
    drafted_text: str | None
    logit_gap: float | None
    margin: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One way of drafting, compared with plain decoding of the same prompts."""

    temperature: float
    block_length: int | None  # None: adaptive
    tree_nodes: int | None  # 0: chains; None: adaptive
    draft_source: str
    batch_size: int
    equal: int
    differing: int
    drafted: int  # tokens
    accepted: float  # the share of them
    tokens_per_pass: float
    first_difference: Difference | None


def chains(block_lengths: Sequence[int | None]) -> list[DraftingOptions]:
    """The ways to draft chains of these lengths."""
    return [{"block_length": length, "tree_nodes": 0} for length in block_lengths]


def token_ids(llm: LLM, prompts: Sequence[Prompt], context: int = 0) -> list[list[int]]:
    """The tokens of the prompts, each behind `context` tokens of text: those of all prompts, again and again."""
    ids = [prompt.token_ids(llm.tokenizer) for prompt in prompts]
    return [[*islice(cycle(chain.from_iterable(ids)), context), *prompt_ids] for prompt_ids in ids]


def verify(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    ways: Sequence[DraftingOptions],
    batch_sizes: Sequence[int],
    max_tokens: int,
    context: int = 0,
) -> Iterator[Case]:
    """Compare plain decoding, one prompt at a time, with every way of drafting. Yields each case when done.

    context: so many tokens of text come before each prompt.

    A drafted token is accepted only if plain decoding, with the same noise, would choose it. So tokens are equal at
    every temperature, unless the arithmetic of a row depends on the number of rows in its pass.
    """
    asked = token_ids(llm, prompts, context)
    for temperature in temperatures:
        sampling = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=TOP_P if temperature > 0 else 1.0,
                seed=seed,
            )
            for seed in range(len(prompts))
        ]
        plain = [
            llm.generate(prompt, params, speculate=False)
            for prompt, params in zip(asked, sampling, strict=True)
        ]
        for way in ways:
            for batch_size in batch_sizes:
                drafted: list[Completion] = []
                for first in range(0, len(prompts), batch_size):
                    batch = slice(first, first + batch_size)
                    drafted += llm.generate(asked[batch], sampling[batch], **way)
                yield _compare(llm, prompts, plain, drafted, sampling, way, batch_size)


def _compare(
    llm: LLM,
    prompts: Sequence[Prompt],
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    sampling: Sequence[SamplingParams],
    way: DraftingOptions,
    batch_size: int,
) -> Case:
    differing = [
        i
        for i, (one, other) in enumerate(zip(plain, drafted, strict=True))
        if one.token_ids != other.token_ids
    ]
    statistics = Statistics.merge(completion.statistics for completion in drafted)
    i = differing[0] if differing else -1
    return Case(
        temperature=sampling[0].temperature,
        block_length=way.get("block_length"),
        tree_nodes=way.get("tree_nodes"),
        draft_source=way.get("draft_source", RequestOptions.draft_source),
        batch_size=batch_size,
        equal=len(prompts) - len(differing),
        differing=len(differing),
        drafted=statistics.num_draft_tokens,
        accepted=statistics.num_accepted_tokens / max(statistics.num_draft_tokens, 1),
        tokens_per_pass=statistics.tokens_per_pass,
        first_difference=_difference(llm, prompts[i].id, plain[i], drafted[i], sampling[i])
        if differing
        else None,
    )


def _difference(
    llm: LLM, prompt_id: str, plain: Completion, drafted: Completion, params: SamplingParams
) -> Difference:
    pairs = zip_longest(plain.token_ids, drafted.token_ids)
    position, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    gap, margin = None, None
    if one is not None and other is not None:
        before = [*plain.prompt_token_ids, *plain.token_ids[:position]]
        logits = llm.logits(before)
        gap = float(logits[one]) - float(logits[other])
        margin = _margin(logits, one, other, params, len(before))
    plain_text, drafted_text = (
        None if token is None else llm.tokenizer.decode([token], skip_special_tokens=False)
        for token in (one, other)
    )
    return Difference(prompt_id, position, one, other, plain_text, drafted_text, gap, margin)


def _margin(logits: Any, one: int, other: int, params: SamplingParams, position: int) -> float | None:
    ahead = float(logits[one]) - float(logits[other])
    if params.temperature > 0:
        scores = process(logits, params)[[one, other]]
        assert params.seed is not None
        scores = scores + gumbel_from_bits(token_bits(params.seed, position, np.array([one, other])))
        ahead = float(scores[0] - scores[1]) * params.temperature
    return ahead / float(np.std(logits)) if np.isfinite(ahead) else None
