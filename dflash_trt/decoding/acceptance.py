"""The acceptance rule, the verdict on a verified block, and what a request gets of it: tokens, text, or its end.

An error here ends only its request. This holds for any error, including a library's panic, which Python sees as a
BaseException. Only an interruption of the whole process propagates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.decoding.draft import Draft, Verified
from dflash_trt.decoding.params import FinishReason, SamplingParams
from dflash_trt.decoding.request import Emission, Request
from dflash_trt.decoding.sampling.history import History
from dflash_trt.decoding.sampling.sampler import log_probabilities, rank, sample
from dflash_trt.errors import INTERRUPTIONS, DecodingError, NonFiniteError, RequestError


@dataclass(slots=True)
class Verdict:
    """A round's decision for one request, over the nodes of its `Draft`.

    path: the accepted nodes, from the anchor's child down. In a chain: 1, 2, ...
    token: the token after the last of them; -1 if not `ok`.
    ok: whether the logits of that last node have a finite largest value. The nodes of `path` are accepted in either
    case.
    """

    path: Sequence[int]
    token: int
    ok: bool = True


# The verdict of a request that failed before its decision.
UNDECIDED = Verdict((), -1, ok=False)


def judge(request: Request, tokens: Sequence[int], draft: Draft, verified: Verified, slot: int) -> Verdict:
    """The verdict on a request's own part of its draft: the engine's decision if it made one, else that of `accept`.

    tokens: the verified nodes of this request. Its own part is the first of them, and may be shorter.
    """
    length, parents = draft.length_of(slot, request), draft.parents_of(slot)
    if not verified.decided[slot]:
        logits, position = verified.logits[slot], request.committed + 1
        return accept(
            tokens[:length], logits, request.params, request.seed, position, request.history, parents
        )
    if verified.sampled is not None:
        chosen = verified.sampled[slot].tolist()
        return _walk(tokens[:length], parents, lambda node, _: chosen[node])
    accepted, token = int(verified.accepted[slot]), int(verified.next_token[slot])
    # The engine's decision covers the whole chain. Here drafts beyond the own part were accepted too.
    if accepted >= length:
        accepted, token = length - 1, tokens[length]
    if verified.finite is not None and not (finite := verified.finite[slot, : accepted + 1]).all():
        return Verdict(range(1, int(finite.argmin()) + 1), -1, ok=False)
    return Verdict(range(1, accepted + 1), token, ok=token >= 0)


def accept(
    tokens: Sequence[int],
    logits: NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    position: int,
    history: History | None = None,
    parents: Sequence[int] | None = None,
) -> Verdict:
    """The accepted nodes of a draft, and the token after them.

    tokens, parents: the N nodes of one request, as in `Draft`.
    logits: float32 [N, V]. Row i holds the target's logits for the token after node i.
    position: the position of the token that row 0 predicts.
    history: every token up to the anchor, if `params.adjusted`. The committed tokens are added.

    The logits of a node decide the token after it. If a child of the node has that token, the child saw a true
    history, and its own logits decide the next token. The walk ends when no child has the token: all other nodes saw
    a false history. So each committed token is `sample` of the logits after its own true history, at its own
    position. Decoding one token at a time commits the same. The drafts do not influence the tokens; better drafts
    only make the path longer. `sample` draws from the target's distribution, so the result has that distribution.
    """
    if not tokens:
        raise ValueError("accept needs at least the anchor's token")

    def chosen(node: int, depth: int) -> int:
        try:
            token = sample(logits[node], params, seed, position + depth, history)
            if history is not None:
                history.add(token)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            if depth == 0 and not isinstance(error, NonFiniteError):
                raise
            # After drafts the request may have ended. If not, the next round meets it without drafts.
            return -1
        return token

    return _walk(tokens, parents, chosen)


def _walk(tokens: Sequence[int], parents: Sequence[int] | None, chosen: Callable[[int, int], int]) -> Verdict:
    """The nodes from the anchor down that have the chosen tokens. `chosen` gives the token after a node and its depth,
    -1 if it has no usable logits.
    """
    if parents is None:
        parents = range(-1, len(tokens) - 1)
    children: dict[tuple[int, int], int] = {}
    for child in range(1, len(tokens)):
        children.setdefault((parents[child], tokens[child]), child)
    node, path = 0, list[int]()
    while (token := chosen(node, len(path))) >= 0:
        if (node := children.get((node, token), 0)) == 0:
            return Verdict(path, token)
        path.append(node)
    return Verdict(path, -1, ok=False)


Array = np.ndarray[Any, Any]


def decide(request: Request, draft: Draft, verified: Verified, slot: int) -> tuple[Verdict, Emission]:
    """The verdict on the verified nodes of `slot`, and its tokens: the accepted drafts and the next token."""
    verdict = UNDECIDED
    try:
        tokens = draft.tokens_of(slot)
        verdict = judge(request, tokens, draft, verified, slot)
        path, copied, statistics = verdict.path, draft.copied.get(slot), request.statistics
        drafts = draft.length_of(slot, request) - 1
        statistics.record_round(drafts, len(path), tree=draft.parents is not None)
        found = 0
        if copied:
            found = sum(node in copied for node in path)
            statistics.num_lookup_draft_tokens += sum(node <= drafts for node in copied)
            statistics.num_lookup_accepted_tokens += found
        history = request.history
        if not verdict.ok and len(tokens) == 1 and (history is None or not verified.decided[slot]):
            return verdict, fail(request, non_finite(request.committed + 1))
        # Where it is not ok, perhaps because of a draft, the next round decides without drafts, and the host if the
        # logits are adjusted.
        decided = [*(tokens[node] for node in path), *([verdict.token] if verdict.ok else [])]
        if history is not None and verified.decided[slot]:
            for token in decided:
                history.add(token)
        odds = _odds(request, verified, slot, [0, *path], decided) if request.params.logprobs else None
        return verdict, _emit(request, decided, odds, len(path), drafts, found)
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        return verdict, fail(request, error)


def leave(request: Request, reason: FinishReason) -> Emission:
    """The end of a cancelled or late request, with the text that was held back."""
    if request.output:
        request.statistics.generation_time = perf_counter() - request.first_token_at
    return isolated(request, lambda: Emission(request, [], request.stop.abandon(reason), reason))


def fail(request: Request, error: BaseException) -> Emission:
    """The end of a request by its own error. Its earlier tokens stay valid."""
    if request.output:
        request.statistics.generation_time = perf_counter() - request.first_token_at
    if not isinstance(error, RequestError):
        cause, error = error, DecodingError(f"decoding failed: {type(error).__name__}: {error}")
        error.__cause__ = cause
    try:
        text = request.stop.abandon("error")
    except INTERRUPTIONS:
        raise
    except BaseException:  # the text itself may cause the error
        text = ""
    return Emission(request, [], text, "error", error=error)


def non_finite(position: int) -> NonFiniteError:
    """The error of a request without usable logits for its token at `position`."""
    return NonFiniteError(
        f"the target's logits for the token at position {position} have no finite largest value (NaN, or infinite): "
        "the engine's numbers overflowed, or the checkpoint has such weights; build with a wider precision"
    )


def isolated(request: Request, work: Callable[[], Emission]) -> Emission:
    """The result of `work` for a request. An error in it ends the request."""
    try:
        return work()
    except INTERRUPTIONS:
        raise
    except BaseException as error:
        return fail(request, error)


def first_token(request: Request, logits: Array) -> Emission:
    """The token after the prompt, from the logits [V] of the prompt's last row."""

    def emission() -> Emission:
        token = sample(logits, request.params, request.seed, request.committed, request.history)
        if request.history is not None:
            request.history.add(token)
        request.first_token_at = perf_counter()
        request.statistics.time_to_first_token = request.first_token_at - request.arrived
        odds = _odds_of(request, logits[None], [token]) if request.params.logprobs else None
        return _emit(request, [token], odds)

    return isolated(request, emission)


_Odds = tuple[float, list[tuple[int, float]]]  # log-probabilities of a token, and of the most probable ones


def _odds(
    request: Request, verified: Verified, slot: int, nodes: list[int], tokens: list[int]
) -> Iterator[_Odds]:
    """Of the tokens after these nodes: the engine's, or from their logits."""
    if slot not in verified.logprobs:
        return _odds_of(request, verified.logits[slot][nodes], tokens)
    logprobs, ids, best = (numbers[nodes] for numbers in verified.logprobs[slot])
    most = request.params.top_logprobs
    tops = zip(ids[:, :most].tolist(), best[:, :most].tolist(), strict=True)
    return zip(logprobs.tolist(), (list(zip(*top, strict=True)) for top in tops), strict=True)


def _odds_of(request: Request, logits: Array, tokens: list[int]) -> Iterator[_Odds]:
    most = request.params.top_logprobs
    return (log_probabilities(row, token, most) for row, token in zip(logits, tokens, strict=False))


def _emit(
    request: Request,
    tokens: list[int],
    odds: Iterator[_Odds] | None,
    accepted: int = 0,
    drafts: int = 0,
    copied: int = 0,
) -> Emission:
    """Emit tokens, the first `accepted` of them drafts, of `drafts` that were verified; the last `copied` of the
    accepted ones from the request's own text.

    odds: of each token, if log-probabilities are requested.
    """
    request.output += tokens
    kept, text, reason = request.stop.push(tokens)
    request.statistics.num_generation_tokens += kept
    if reason is not None:
        request.statistics.generation_time = perf_counter() - request.first_token_at
    logprobs = tops = None
    if odds is not None:
        numbers = list(islice(odds, kept))
        logprobs = [logprob for logprob, _ in numbers]
        request.logprobs += logprobs
        if request.params.top_logprobs:
            tops = [top for _, top in numbers]
            request.top_logprobs += tops
    emission = Emission(request, tokens[:kept], text, reason, logprobs, tops, drafts=drafts)
    emission.accepted = min(accepted, kept)
    emission.copied = max(0, copied - max(0, accepted - kept))
    return emission


def read_prompt(request: Request, logits: Array, start: int) -> None:
    """Note log-probabilities and ranks of the prompt's tokens start + 1, ..., from the logits [n, V] before them."""
    if start == 0:
        request.prompt_logprobs, request.prompt_top_logprobs, request.prompt_ranks = [None], [[]], [None]
    for row, token in zip(logits, request.prompt[start + 1 :], strict=False):
        logprob, top = log_probabilities(row, token, request.params.top_logprobs)
        request.prompt_logprobs.append(logprob)
        request.prompt_top_logprobs.append(top)
        request.prompt_ranks.append(rank(row, token))
