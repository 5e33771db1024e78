"""What a request gives: text and tokens, whole or in chunks, and statistics under the field names of vLLM's metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from dflash_trt.decoding.params import FinishReason


@dataclass
class Statistics:
    """Counts and times of one request. `merge` gives the aggregate of several. Times are in seconds.

    num_drafts: verification passes with at least one drafted token (as in vLLM).
    acceptance_histogram[k]: the number of them that accepted exactly k drafted tokens.
    block_length_histogram[n]: rounds that verified n tokens, including the anchor; 1 is a round without a draft.
    num_trees: rounds that verified a tree instead of a chain. Each of its nodes but the anchor is a drafted token.
    num_tree_nodes: the nodes of these trees, including the anchors.
    num_lookup_draft_tokens, num_lookup_accepted_tokens: of the drafted and the accepted tokens, those from the
        request's own text.
    prefill_time, draft_time, verify_time, host_time: time in passes that served this request, and in host code
    between them.
        A batched pass counts in full for each of its requests.
    num_cached_tokens: prompt tokens whose cache rows were reused from another request.
    queue_time: from arrival to the first prefill pass.
    time_to_first_token: from arrival.
    generation_time: from the first generated token to the last.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_trees: int = 0
    num_tree_nodes: int = 0
    num_lookup_draft_tokens: int = 0
    num_lookup_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    block_length_histogram: list[int] = field(default_factory=list)
    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    generation_time: float = 0.0
    prefill_time: float = 0.0
    draft_time: float = 0.0
    verify_time: float = 0.0
    host_time: float = 0.0
    num_requests: int = 1

    def __str__(self) -> str:
        """Tokens, speed from the arrival on, and what drafts gave: 24 tokens, 310 tokens/s, 3.10 tokens per pass."""
        seconds = self.time_to_first_token + self.generation_time
        parts = [f"{self.num_generation_tokens} tokens"]
        if self.num_requests == 1 and seconds > 0:
            parts.append(f"{self.num_generation_tokens / seconds:.0f} tokens/s")
        parts.append(f"{self.tokens_per_pass:.2f} tokens per pass" if self.num_drafts else "no drafts")
        return ", ".join(parts)

    def record_round(self, drafted: int, accepted: int, *, tree: bool = False) -> None:
        """Record one verification of the anchor and `drafted` tokens, which accepted `accepted` of them.

        In a chain these are the first ones.
        """
        add_at(self.block_length_histogram, drafted + 1, 1)
        if drafted and tree:
            self.num_trees += 1
            self.num_tree_nodes += drafted + 1
        if drafted:
            add_at(self.acceptance_histogram, drafted, 0)  # as long as the longest block
            add_at(self.acceptance_histogram, accepted, 1)
            self.num_drafts += 1
            self.num_draft_tokens += drafted

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(k * n for k, n in enumerate(self.acceptance_histogram))

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """The number of accepted drafts at each position of the block (from 0)."""
        tail = sum(self.acceptance_histogram)
        return [tail := tail - n for n in self.acceptance_histogram[:-1]]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per verification pass, with or without a draft; 1.0 without any pass."""
        passes = sum(self.block_length_histogram)
        return 1 + self.num_accepted_tokens / passes if passes else 1.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification pass with a draft (as in vLLM): 1 + accepted / drafts; 1.0 without any draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def mean_tree_nodes(self) -> float:
        """Nodes of a tree, including the anchor; 0.0 without any tree."""
        return self.num_tree_nodes / self.num_trees if self.num_trees else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafted tokens / drafted tokens; 0.0 without any draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def time_per_output_token(self) -> float:
        """Seconds per token after the first of each request; 0.0 without such tokens."""
        after_first = self.num_generation_tokens - self.num_requests
        return self.generation_time / after_first if after_first > 0 else 0.0

    @classmethod
    def merge(cls, parts: Iterable[Statistics]) -> Statistics:
        """Sums of counts and times; `time_to_first_token` is the mean over requests."""
        total = cls(num_requests=0)
        for part in parts:
            total.time_to_first_token += part.time_to_first_token * part.num_requests
            for name in _HISTOGRAMS:
                for k, n in enumerate(getattr(part, name)):
                    add_at(getattr(total, name), k, n)
            for name in _SUMMED:
                setattr(total, name, getattr(total, name) + getattr(part, name))
        total.time_to_first_token /= max(total.num_requests, 1)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Every field and derived figure, ready for JSON."""
        derived = [name for name, value in vars(Statistics).items() if isinstance(value, property)]
        values = {name: getattr(self, name) for name in [f.name for f in fields(self)] + derived}
        return {k: list(v) if k in _HISTOGRAMS else v for k, v in values.items()}


def add_at(histogram: list[int], index: int, count: int) -> None:
    """Add to one entry of a histogram, which grows to hold it."""
    if len(histogram) <= index:
        histogram.extend([0] * (index + 1 - len(histogram)))
    histogram[index] += count


_HISTOGRAMS = ("acceptance_histogram", "block_length_histogram")
_SUMMED = [f.name for f in fields(Statistics) if f.name not in ("time_to_first_token", *_HISTOGRAMS)]


TopLogprobs = list[tuple[int, float]]
"""The most probable tokens of a position, best first: token id and log-probability."""


@dataclass(frozen=True)
class Completion:
    """One finished request.

    token_ids: include the stop token.
    text: excludes the stop token, and ends before a stop string, unless they are asked for.
    logprobs: one number per token, if requested. top_logprobs: one list per token.
    prompt_logprobs: one number per token of the prompt, if requested. The first is None, because nothing precedes it.
    prompt_top_logprobs: one list per token of the prompt; the first is empty.
    prompt_ranks: with prompt_logprobs, the place of each of these tokens among all by probability. 1 is the best.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: Statistics
    seed: int
    prompt_token_ids: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TopLogprobs] | None = None
    prompt_ranks: list[int | None] | None = None

    def __repr__(self) -> str:
        return f"Completion({self.text!r}, {self.finish_reason!r}, {self.statistics})"


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a stream. `text` may lag behind the tokens.

    The first chunk has the prompt's token ids and log-probabilities, the last one the statistics.
    rounds: for each round in this chunk its tokens, how many of them, the first ones, were drafted, how many drafts
        were verified, and how many of the drafted ones, the last, come from the request's own text. The token after the
        prompt is a round of its own.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TopLogprobs] | None = None
    prompt_ranks: list[int | None] | None = None
    rounds: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __repr__(self) -> str:
        ended = "" if self.finish_reason is None else f", {self.finish_reason!r}"
        return f"Chunk({self.text!r}, {self.token_ids}{ended})"
