"""The array operations of a pair: on the host here, on a GPU in `dflash_trt/engines/device/arrays.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf, isfinite
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from dflash_trt.decoding.caches import Caches
from dflash_trt.decoding.draft import Candidates, Draft, Verified
from dflash_trt.decoding.request import Request

Array = np.ndarray[Any, Any]

_FEW_ROWS = 64  # unread rows of a slot that are more are a prompt


class Runner(Protocol):
    """Runs one graph over its caches: named arrays in, named arrays out."""

    @property
    def caches(self) -> Caches:
        """The caches that its passes read and write."""

    def close(self) -> None:
        """Free them and the runner."""


class Following(Protocol):
    """Starts a round before the host has the result of the one before it, from what the device has of that result. It
    has as many nodes, in chains, and the same requests in their slots, others that have read their prompts since, and
    `NOBODY` where one has ended.

    Rows of windows lie where the round before needed them, and move once the host knows where this one began.
    """

    def possible(self, active: Sequence[Request], nodes: int) -> bool:
        """Whether a round may follow the one that was started last, over so many nodes of these requests: the device
        decides alone, and caches have room for it. Not where it would take fewer slots if requests moved.
        """

    def prepare(
        self,
        active: Sequence[Request],
        begun: Draft,
        texts: Mapping[int, Sequence[int]],
        unread: Sequence[int],
    ) -> Sequence[int]:
        """Make the inputs of its passes.

        begun: the draft of the round before, of N nodes. texts: by slot, 2N - 1 tokens that may come after its anchors.
        Where the new anchor is the one of these in its place, those after it are drafted.
        unread: by slot, the features that wait for the drafter, of a request that was not in the round before. Returns
        the slots of those.
        """

    def run_again(self, runner: Any) -> Mapping[str, Any]:
        """Run the last round's pass of a runner again, over these inputs."""

    def anchors(self) -> Draft:
        """The chains of one node that the target's pass verifies."""

    def settle(self, slot: int, start: int, read: int | None) -> None:
        """Note where this round's pass of the target began in a slot, and how many features before that the drafter's
        read; None: it had no pass. Rows of windows move there for the next round.
        """


class Arrays(Protocol):
    """Runs the passes of a pair's runners, and passes their numbers from one pass to the next.

    Feeds are NumPy arrays, or arrays that these methods returned. Outputs are views that the runner's next pass of
    the same kind overwrites. Features of committed tokens wait here for the drafter, by slot, one row [F] per token.

    most_unread: the most unread rows of a slot.
    feature_bytes: of one row.
    prompts_wait: whether rows of a prompt may wait, too. Then all caches of the drafter can be cut to any length.
    most_prompt_rows: the most rows of a prompt that one pass may give logits for.
    most_nodes: the most nodes of a request that one pass verifies.
    most_together: the most prompts that one pass reads.
    asynchronous: whether `decode` returns before its pass has ended.
    samples: whether kernels decide for sampled requests, or the host; may be set to False.
    following: what starts rounds ahead; None: they wait for the host.
    """

    most_unread: int
    feature_bytes: int
    prompts_wait: bool
    most_prompt_rows: int
    most_nodes: int
    most_together: int
    asynchronous: bool
    samples: bool

    @property
    def following(self) -> Following | None:
        """As above."""

    def prefill(self, runner: Any, feeds: Mapping[str, Any], slot: int) -> Mapping[str, Any]:
        """Run a pass over one sequence, in this slot, or over several, in those from this one on."""

    def decode(self, runner: Any, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run a pass over n sequences, in slots 0 .. n-1.

        The target's `tokens` [n, N] may have fewer columns than its `rows` [n, S]. The last one is repeated.
        """

    def width(self, nodes: int) -> int:
        """The rows of a sequence in a pass of `decode` over so many nodes of the target."""

    def prompt_width(self, tokens: int) -> int:
        """The rows of a pass over so many tokens of a prompt."""

    def now(self) -> Any:
        """A point in time between two passes."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two points, once the pass between them has ended."""

    def stream(self) -> AbstractContextManager[Any]:
        """Within this, the thread's work goes where the passes run, and a lack of memory is a MemoryError."""

    def wait(self) -> None:
        """Wait until all passes have ended."""

    def readable(self, *outputs: Any) -> Sequence[Array]:
        """The numbers of each output on the host, which the next pass may overwrite. Waits once, for all of them."""

    def nodes(self, count: int, nodes: int) -> Any:
        """The numbers 0 .. nodes-1 of the nodes, for each of `count` sequences: int64 [count, nodes]."""

    def alone(self, anchors: Sequence[int], places: Sequence[int]) -> Draft:
        """Chains of anchors without drafts, for a round without a pass of the drafter after this.

        places: the unread row of each slot that the anchor's features will be. After a pass it is the first.
        """

    def blocks(self, anchors: Sequence[int], length: int, mask: int) -> Any:
        """Anchors, each followed by `length - 1` mask tokens: int64 [n, length], valid until the next call."""

    def start_round(self, active: Sequence[Request]) -> None:
        """Begin a round of these requests. The drafter's numbers count as finite."""

    def finite(self, numbers: Any) -> Any:
        """Whether all numbers are finite: a truth value for `readable`."""

    def drafts(self, blocks: Any, tokens: Any, logprobs: Any) -> Draft:
        """Chains in which the best tokens replace the mask tokens, and their candidates [n, length-1, W], best first.

        `tokens` and `logprobs` are the drafter's outputs.
        """

    def chains(self, tokens: Array, logprobs: Array) -> Draft:
        """Chains from numbers of the host: the nodes [n, N], and the log-probabilities [n, N-1] of their drafts."""

    def replace(self, draft: Draft) -> None:
        """Put the `replaced` tokens of a draft into this round's chains."""

    def verified(
        self, active: Sequence[Request], draft: Draft, outputs: Mapping[str, Any]
    ) -> Callable[[], Verified]:
        """Start what decides over a round's draft after the target's pass. Returns what waits for the result."""

    def add_unread(self, slot: int, at: int, features: Any, nodes: Sequence[int]) -> None:
        """Add these rows of a slot's features to the unread ones, as rows at, at + 1, ... of the slot. features: [n, N,
        F] of the target's last pass, or, where prompts wait, other rows [N, F] by slot.
        """

    def unread_features(self, counts: Sequence[int]) -> Any:
        """The unread rows of slots 0 .. n-1: [n, S, F], with S at least each count. Rows beyond a count are finite."""

    def unread_features_of(self, slot: int, first: int, stop: int) -> Any:
        """Rows first .. stop-1 of one slot: [1, stop - first, F]."""

    def copy_unread(self, source: int, target: int, count: int) -> None:
        """Copy the first rows of one slot over another's."""

    def clear_unread(self, slot: int) -> None:
        """Set the rows of a slot to 0."""


def chosen(nodes: Sequence[int]) -> Any:
    """An index of these rows. In a chain, they are the first ones."""
    return slice(len(nodes)) if nodes[-1] < len(nodes) else list(nodes)


class HostArrays:
    """NumPy arrays. A pass has ended when its runner returns. `Arrays` documents the methods."""

    asynchronous = samples = False
    following = None
    most_nodes = 128  # 78 MB of logits at a vocabulary of 151,936
    most_together = 1  # a prompt's rows have the same bits beside any others

    def __init__(
        self,
        *,
        slots: int,
        feature_size: int,
        most_unread: int,
        prompts_wait: bool = True,
        most_prompt_rows: int = 64,  # 39 MB at a vocabulary of 151,936
    ) -> None:
        self.most_unread, self.most_prompt_rows = most_unread, most_prompt_rows
        self.feature_bytes, self.prompts_wait = 4 * feature_size, prompts_wait
        # By slot, with room for the most rows that it had.
        self._unread = [np.zeros((0, feature_size), np.float32) for _ in range(slots)]
        self._nodes: dict[tuple[int, int], Array] = {}
        self._drafts_finite: list[bool] = []

    def prefill(self, runner: Any, feeds: Mapping[str, Any], slot: int) -> Mapping[str, Any]:
        outputs: Mapping[str, Any] = runner.run(feeds, first_slot=slot)
        return outputs

    def decode(self, runner: Any, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        spare = feeds["rows"].shape[1] - feeds["tokens"].shape[1] if "rows" in feeds else 0
        if spare:
            feeds = {**feeds, "tokens": np.pad(feeds["tokens"], ((0, 0), (0, spare)), mode="edge")}
        outputs: Mapping[str, Any] = runner.run(feeds)
        return outputs

    def width(self, nodes: int) -> int:
        return nodes

    def prompt_width(self, tokens: int) -> int:
        return tokens

    def now(self) -> float:
        return perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self) -> None:
        pass

    def readable(self, *outputs: Any) -> Sequence[Any]:
        return outputs

    def nodes(self, count: int, nodes: int) -> Array:
        numbers = self._nodes.get((count, nodes))
        if numbers is None:
            numbers = self._nodes[count, nodes] = np.tile(np.arange(nodes), (count, 1))
        return numbers

    def alone(self, anchors: Sequence[int], places: Sequence[int]) -> Draft:
        return Draft(np.array(anchors)[:, None], None, np.zeros((len(anchors), 0), np.float32))

    def blocks(self, anchors: Sequence[int], length: int, mask: int) -> Array:
        blocks = np.full((len(anchors), length), mask)
        blocks[:, 0] = anchors
        return blocks

    def start_round(self, active: Sequence[Request]) -> None:
        self._drafts_finite = [True] * len(active)

    def finite(self, numbers: Array) -> Any:
        return np.isfinite(numbers).all()

    def drafts(self, blocks: Array, tokens: Array, logprobs: Array) -> Draft:
        self._drafts_finite = [bool(row.all()) for row in np.isfinite(logprobs)]
        blocks[:, 1:] = tokens[:, :, 0]
        candidates = Candidates(tokens, logprobs) if tokens.shape[2] > 1 else None
        return Draft(blocks, None, logprobs[:, :, 0], candidates)

    def chains(self, tokens: Array, logprobs: Array) -> Draft:
        return Draft(tokens, None, logprobs)

    def replace(self, draft: Draft) -> None:
        for slot, tokens in draft.replaced.items():
            draft.tokens[slot, 1 : 1 + len(tokens)] = tokens

    def verified(
        self, active: Sequence[Request], draft: Draft, outputs: Mapping[str, Any]
    ) -> Callable[[], Verified]:
        """The graph decides for greedy requests with chains."""
        chains, logits = draft.parents is None, outputs["logits"]
        return lambda: Verified(
            outputs["accepted"],
            outputs["next_token"],
            decided=[chains and request.params.greedy for request in active],
            finite=_rows_not_finite(logits),
            logits=logits,
            drafts_finite=self._drafts_finite,
        )

    def add_unread(self, slot: int, at: int, features: Array, nodes: Sequence[int]) -> None:
        stop = at + len(nodes)
        self._make_room(slot, stop)
        self._unread[slot][at:stop] = features[slot][chosen(nodes)]

    def unread_features(self, counts: Sequence[int]) -> Array:
        features = np.zeros((len(counts), max(1, *counts), self._unread[0].shape[1]), np.float32)
        for slot, count in enumerate(counts):
            rows = self._unread[slot][:count]
            features[slot, : len(rows)] = rows
        return features

    def unread_features_of(self, slot: int, first: int, stop: int) -> Array:
        return self._unread[slot][None, first:stop]

    def copy_unread(self, source: int, target: int, count: int) -> None:
        self._make_room(target, count)
        self._unread[target][:count] = self._unread[source][:count]

    def clear_unread(self, slot: int) -> None:
        self._unread[slot] = self._unread[slot][:0].copy()

    def _make_room(self, slot: int, rows: int) -> None:
        held = self._unread[slot]
        if rows > len(held):
            # For a prompt, all at once: what is not written takes no memory, and growing leaves parts behind.
            room = 2 * rows if 2 * rows <= _FEW_ROWS else max(rows, self.most_unread)
            self._unread[slot] = np.zeros((room, held.shape[1]), np.float32)
            self._unread[slot][: len(held)] = held


def _rows_not_finite(logits: Array) -> Array | None:
    """Whether the largest value of each row is finite; None if all are."""
    # Any NaN is the largest value. If that is finite, only -infinity is left to be the largest of a row.
    if isfinite(logits.max()) and logits[..., 0].min() > -inf:
        return None
    finite: Array = np.isfinite(logits.max(axis=-1))
    return None if finite.all() else finite
