"""Does drafting change the tokens? Every prompt with and without it, and the first place where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from dflash_trt.decoding.params import Completion, SamplingParams
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.errors import RequestError, show
from dflash_trt.files.reading import parse_object, read_text
from dflash_trt.llm import LLM

SHIPPED_PROMPTS = Path(__file__).parent.parent / "shipped" / "prompts"
# Sampled tokens are compared at this top-p, and prompt i with seed i.
TOP_P = 0.95
_PROMPTS_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file: messages go through the chat template, text goes in as it is."""

    id: str
    category: str
    content: str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two token sequences part; a token is None where its sequence has ended."""

    prompt_id: str
    position: int
    plain_token: int | None
    drafted_token: int | None
    plain_text: str | None
    drafted_text: str | None
    logit_gap: float | None


@dataclass(frozen=True, slots=True)
class Case:
    """One way of drafting, against plain decoding of the same prompts."""

    temperature: float
    block_length: int | None  # None: adaptive
    batch_size: int
    equal: int
    differing: int
    mean_acceptance_length: float
    first_difference: Difference | None


def read_prompts(file: Path | None, limit: int) -> list[Prompt]:
    """The prompts of a JSONL file, or the shipped ones; at most `limit` (0: all), each category in turn.

    Raises RequestError naming the file and line of a malformed prompt.
    """
    files = sorted(SHIPPED_PROMPTS.glob("*.jsonl")) if file is None else [file]
    prompts = [prompt for each in files for prompt in _read_file(each)]
    if not prompts:
        raise RequestError(
            f"{file or SHIPPED_PROMPTS}: no prompts; expected JSON lines with a prompt or messages field"
        )
    # Rank within the category first: the first prompt of every category, then the second of every category.
    seen: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        ranked.append((seen.setdefault(prompt.category, 0), prompt))
        seen[prompt.category] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [prompt for _, prompt in ranked][: limit or None]


def _read_file(file: Path) -> Iterator[Prompt]:
    for number, line in enumerate(read_text(file, _PROMPTS_BYTES, RequestError).split("\n"), start=1):
        if not line.strip():
            continue
        fields = parse_object(line, f"{file}:{number}", RequestError)
        content = fields.get("messages", fields.get("prompt"))
        if not isinstance(content, (str, list)) or not content:
            raise RequestError(
                f'{file}:{number}: expected {{"prompt": "..."}} or {{"messages": [...]}}, found {show(fields)}'
            )
        yield Prompt(str(fields.get("id", f"{file.stem}:{number}")), str(fields.get("category", "")), content)


def verify(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    temperatures: Sequence[float],
    block_lengths: Sequence[int | None],
    batch_sizes: Sequence[int],
    max_tokens: int,
) -> Iterator[Case]:
    """Compare plain decoding, one prompt at a time, with every way of drafting; yields each case when done.

    A drafted token is accepted only if plain decoding would choose it, noise included. So tokens are equal at
    every temperature, unless the arithmetic of a row depends on how many rows go through a pass with it.
    """
    asked = [
        prompt.content if isinstance(prompt.content, str) else llm.chat_prompt(prompt.content)
        for prompt in prompts
    ]
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
        for block_length in block_lengths:
            for batch_size in batch_sizes:
                drafted: list[Completion] = []
                for first in range(0, len(prompts), batch_size):
                    batch = slice(first, first + batch_size)
                    drafted += llm.generate(asked[batch], sampling[batch], block_length=block_length)
                yield _compare(llm, prompts, plain, drafted, temperature, block_length, batch_size)


def _compare(
    llm: LLM,
    prompts: Sequence[Prompt],
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
    temperature: float,
    block_length: int | None,
    batch_size: int,
) -> Case:
    differing = [
        i
        for i, (one, other) in enumerate(zip(plain, drafted, strict=True))
        if one.token_ids != other.token_ids
    ]
    statistics = Statistics.merge(completion.statistics for completion in drafted)
    return Case(
        temperature=temperature,
        block_length=block_length,
        batch_size=batch_size,
        equal=len(prompts) - len(differing),
        differing=len(differing),
        mean_acceptance_length=statistics.mean_acceptance_length,
        first_difference=_difference(
            llm, prompts[differing[0]].id, plain[differing[0]], drafted[differing[0]]
        )
        if differing
        else None,
    )


def _difference(llm: LLM, prompt_id: str, plain: Completion, drafted: Completion) -> Difference:
    pairs = zip_longest(plain.token_ids, drafted.token_ids)
    position, (one, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    gap = None
    if one is not None and other is not None:
        logits = llm.logits([*plain.prompt_token_ids, *plain.token_ids[:position]])
        gap = float(logits[one]) - float(logits[other])
    plain_text, drafted_text = (
        None if token is None else llm.tokenizer.decode([token], skip_special_tokens=False)
        for token in (one, other)
    )
    return Difference(prompt_id, position, one, other, plain_text, drafted_text, gap)
