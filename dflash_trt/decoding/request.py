"""A request in the scheduler, and its result of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_trt.decoding.options import RequestOptions
from dflash_trt.decoding.output.stopping import StopChecker
from dflash_trt.decoding.params import Chunk, Completion, FinishReason, SamplingParams, TopLogprobs
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.errors import RequestError


@dataclass(eq=False)
class Request:
    """One request. `arrived` and `deadline` are times of perf_counter."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    stop: StopChecker
    history: History | None
    arrived: float
    options: RequestOptions = field(default_factory=RequestOptions)
    deadline: float | None = None
    statistics: Statistics = field(default_factory=Statistics)
    takes_drafts: bool = field(init=False)  # as asked, until the drafter gives it numbers that are not finite
    cancelled: bool = False
    sound: bool = True  # False: it ended with numbers that are not finite, and its slot may hold such numbers
    fitting: int | None = None  # nodes of this round's draft that fit its structure; None: all
    in_doubt: bool = False  # its logits were not finite in a round with drafts, perhaps because of the drafts

    output: list[int] = field(default_factory=list)  # every decided token; the last one is the anchor
    slot: int = 0  # valid while it is active or in prefill
    committed: int = 0  # tokens in the target's caches; also the position of the anchor, if there is one
    first_token_at: float = 0.0
    latest_at: float = 0.0  # when the metrics saw its latest tokens
    # If requested: of the kept tokens, and of the prompt's tokens after the first that were read so far.
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.takes_drafts = self.options.speculate

    @property
    def block_length(self) -> int | None:
        """The most tokens of this request that a round verifies; None: no limit of its own."""
        return self.options.block_length

    @property
    def anchor(self) -> int:
        """The newest token: decided, but in no cache yet."""
        return self.output[-1]

    def own_length(self, length: int) -> int:
        """The number of tokens of its block that count in a round that verifies `length`, including the anchor."""
        return min(self.block_length or length, length, self.fitting or length) if self.takes_drafts else 1

    @property
    def structured(self) -> bool:
        """Whether its text must have a form."""
        return self.history is not None and self.history.structure is not None

    @property
    def cached(self) -> Sequence[int]:
        """The tokens in the target's caches."""
        return [*self.prompt, *self.output][: self.committed]


@dataclass(slots=True)
class Emission:
    """A step's result for one request: the kept tokens, the text that is certain now, and the end, if any.

    error: the error that ended the request, if finish_reason is "error".
    accepted: the first so many tokens were drafted, of `drafts` that were verified.
    """

    request: Request
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    error: RequestError | None = None
    accepted: int = 0
    drafts: int = 0


def chunk(emissions: Sequence[Emission]) -> Chunk:
    """A stream's chunk, from the emissions of one or more steps. The last chunk has the statistics."""
    last = emissions[-1]
    logprobs = [each.logprobs for each in emissions if each.logprobs is not None]
    tops = [each.top_logprobs for each in emissions if each.top_logprobs is not None]
    return Chunk(
        "".join([each.text for each in emissions]),
        [token for each in emissions for token in each.token_ids],
        last.finish_reason,
        None if last.finish_reason is None else last.request.statistics,
        [logprob for each in logprobs for logprob in each] if logprobs else None,
        top_logprobs=[top for each in tops for top in each] if tops else None,
        rounds=[(len(each.token_ids), each.accepted, each.drafts) for each in emissions if each.token_ids],
    )


def items(emissions: Sequence[Emission], *, first: bool) -> Iterator[Chunk | RequestError]:
    """A stream's items, from the emissions of some steps: a chunk, and then the error if the request ended with one.

    first: whether these are the first ones. Their chunk has what is known of the prompt.
    """
    if not emissions:
        return
    error, made = emissions[-1].error, chunk(emissions)
    if first:
        request = emissions[-1].request
        made = replace(made, prompt_token_ids=list(request.prompt), **_about_prompt(request))
    if error is None:
        yield made
        return
    if made.token_ids or made.text:
        yield replace(made, finish_reason=None, statistics=None)
    yield error


def completion(request: Request, text: str, token_ids: list[int]) -> Completion:
    """The complete result of an ended request."""
    reason = request.stop.finish_reason
    assert reason is not None
    params = request.params
    return Completion(
        text,
        token_ids,
        reason,
        request.statistics,
        request.seed,
        list(request.prompt),
        request.logprobs if params.logprobs else None,
        request.top_logprobs if params.logprobs and params.top_logprobs else None,
        **_about_prompt(request),
    )


def _about_prompt(request: Request) -> dict[str, Any]:
    params = request.params
    tops = params.prompt_logprobs and params.top_logprobs
    return {
        "prompt_logprobs": request.prompt_logprobs if params.prompt_logprobs else None,
        "prompt_top_logprobs": request.prompt_top_logprobs if tops else None,
    }
