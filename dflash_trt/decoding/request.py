"""A request in the scheduler, its result of each step, and the requests that wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_trt.decoding.lookup import Lookup
from dflash_trt.decoding.output import StopChecker
from dflash_trt.decoding.params import FinishReason, RequestOptions, SamplingParams
from dflash_trt.decoding.results import Chunk, Completion, Statistics, TopLogprobs
from dflash_trt.decoding.sampling.history import History
from dflash_trt.errors import RequestError

# Tokens of a reused prefix that a round gives to the automaton of a text: some 5 ms, in which all requests wait.
_PIECE = 512


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
    takes_drafts: bool = field(init=False)
    # Whether the drafter reads its tokens: as asked, until the drafter gives it numbers that are not finite.
    takes_drafter: bool = field(init=False)
    block_length: int | None = field(init=False)  # its most tokens in a round; None: no own limit
    structured: bool = field(init=False)  # its text must have a form
    lookup: Lookup | None = None  # the automaton of its text, while it runs
    cancelled: bool = False
    sound: bool = True  # False: it ended with numbers that are not finite, and its slot may hold such numbers
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
    prompt_ranks: list[int | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.takes_drafts, self.block_length = self.options.speculate, self.options.block_length
        self.takes_drafter = self.takes_drafts and self.options.takes_drafter
        self.structured = self.history is not None and self.history.structure is not None

    @property
    def ended(self) -> bool:
        """Whether it has got all its tokens, or failed, or left."""
        return self.stop.finish_reason is not None

    @property
    def text(self) -> Sequence[int]:
        """What its slot holds as a round begins: the prompt, and the answer without the anchor."""
        return [*self.prompt, *self.output[:-1]] if self.output else self.prompt

    @property
    def anchor(self) -> int:
        """The newest token: decided, but in no cache yet."""
        return self.output[-1]

    def copied(self, most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that its own text proposes after the anchor, and the length of the match, or 0."""
        if (lookup := self.lookup) is None or (read := len(lookup.text) - len(self.prompt)) < 0:
            self.read_text(_PIECE)
            lookup = self.lookup
            if lookup is None or len(lookup.text) < len(self.prompt):
                return [], 0
        else:
            lookup.extend(self.output[read:])
        return lookup.find(most)

    def read_text(self, most: int) -> None:
        """Let the automaton of its text read up to `most` more tokens of the prompt, and then the answer so far."""
        if not (self.takes_drafts and self.options.takes_lookup):
            return
        lookup = self.lookup = self.lookup or Lookup()
        if (read := len(lookup.text)) < len(self.prompt):
            lookup.extend(self.prompt[read : read + most])
        if (read := len(lookup.text)) >= len(self.prompt):
            lookup.extend(self.output[read - len(self.prompt) :])

    def most_nodes(self, nodes: int) -> int:
        """How many of so many nodes, including the anchor, it takes at most."""
        return min(self.block_length or nodes, nodes) if self.takes_drafts else 1


def _nobody() -> Request:
    nothing: Any = None
    stop = StopChecker(SamplingParams(), (), nothing)
    stop.finish_reason = "cancelled"
    return Request((), SamplingParams(), 0, stop, None, 0.0, RequestOptions(speculate=False))


# Stands in a round for a slot without a request between others. It takes no drafts.
NOBODY = _nobody()


@dataclass(slots=True)
class Emission:
    """A step's result for one request: the kept tokens, the text that is certain now, and the end, if any.

    error: the error that ended the request, if finish_reason is "error".
    accepted: the first so many tokens were drafted, of `drafts` that were verified. The last `copied` of these come
        from the request's own text.
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
    copied: int = 0


def items(emissions: Sequence[Emission], *, first: bool) -> Iterator[Chunk | RequestError]:
    """A stream's items, from the emissions of some steps: a chunk, and then the error if the request ended with one.
    The last chunk has the statistics, unless an error follows.

    first: whether these are the first ones. Their chunk has what is known of the prompt.
    """
    if not emissions:
        return
    last = emissions[-1]
    request, reason = last.request, last.finish_reason if last.error is None else None
    logprobs = [part.logprobs for part in emissions if part.logprobs is not None]
    tops = [part.top_logprobs for part in emissions if part.top_logprobs is not None]
    chunk = Chunk(
        "".join([part.text for part in emissions]),
        [token for part in emissions for token in part.token_ids],
        reason,
        None if reason is None else request.statistics,
        [logprob for part in logprobs for logprob in part] if logprobs else None,
        list(request.prompt) if first else None,
        [top for part in tops for top in part] if tops else None,
        rounds=[
            (len(part.token_ids), part.accepted, part.drafts, part.copied)
            for part in emissions
            if part.token_ids
        ],
        **(_about_prompt(request) if first else {}),
    )
    if last.error is None or chunk.token_ids or chunk.text:
        yield chunk
    if last.error is not None:
        yield last.error


def completion(request: Request, text: str) -> Completion:
    """The complete result of an ended request."""
    reason = request.stop.finish_reason
    assert reason is not None
    params = request.params
    return Completion(
        text,
        request.output[: request.statistics.num_generation_tokens],
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
        "prompt_ranks": request.prompt_ranks if params.prompt_logprobs else None,
    }


_PRIORITY_SECONDS = 1.0  # of waiting that one unit of priority counts for
_FEW = 64  # fewer requests with a deadline are not worth a search for ended ones


class Queue:
    """Waiting requests in the order in which they start, and every request whose deadline passes or that is cancelled.

    A request starts before those that arrived later, where each unit of priority counts like a second of waiting. So
    it is overtaken only by those that arrive within so many seconds as its priority number is higher than theirs.
    The cost of a step grows with the requests that start or leave, not with those that wait. Not thread-safe.
    """

    def __init__(self) -> None:
        self._waiting: dict[Request, None] = {}
        # Heaps of times. The numbers separate equal times. A request that left the queue goes when its turn comes.
        self._turns: list[tuple[float, int, Request]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._numbers = itertools.count()
        self._cancelled: list[Request] = []
        self._most_deadlines = _FEW

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests, in order of arrival."""
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn, and watch it."""
        self._waiting[request] = None
        turn = request.arrived + request.options.priority * _PRIORITY_SECONDS
        heapq.heappush(self._turns, (turn, next(self._numbers), request))
        self.watch(request)

    @property
    def first(self) -> Request:
        """The waiting request whose turn it is."""
        while (request := self._turns[0][2]) not in self._waiting:
            heapq.heappop(self._turns)
        return request

    def pop(self) -> Request:
        """Remove and return the request whose turn it is. It is still watched."""
        request = self.first
        heapq.heappop(self._turns)
        self.remove(request)
        return request

    def remove(self, request: Request) -> bool:
        """Remove a request if it waits. Returns whether it did."""
        waited = request in self._waiting
        self._waiting.pop(request, None)
        if not self._waiting:
            self._turns.clear()
        return waited

    def watch(self, request: Request) -> None:
        """Let `leaving` return a request when it is cancelled or its deadline has passed."""
        if request.cancelled:  # already
            self._cancelled.append(request)
        if request.deadline is None:
            return
        heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        if len(self._deadlines) > self._most_deadlines:  # half of them may have ended: remove those
            self._deadlines = [entry for entry in self._deadlines if entry[2].stop.finish_reason is None]
            heapq.heapify(self._deadlines)
            self._most_deadlines = max(_FEW, 2 * len(self._deadlines))

    def cancel(self, request: Request) -> None:
        """Let the next `leaving` return this request, unless it has ended by then."""
        request.cancelled = True
        self._cancelled.append(request)

    def leaving(self, now: float) -> list[Request]:
        """The requests that leave at this time of perf_counter, each once. They are watched no longer."""
        if not self._cancelled and not self._deadlines:
            return []
        leaving, self._cancelled = self._cancelled, []
        while self._deadlines and self._deadlines[0][0] <= now:
            leaving.append(heapq.heappop(self._deadlines)[2])
        return [request for request in dict.fromkeys(leaving) if request.stop.finish_reason is None]
