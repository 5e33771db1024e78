"""A target and its drafter over one pool of cache slots: the steps of a round, for any engines.

A pass over n sequences uses consecutive slots, as a view of the pool. Position j of a slot belongs to its j-th token.
Positions at or beyond a sequence's `committed` ones are garbage, and the next pass overwrites them. Attention
multiplies them by 0, so they must be finite: NaN x 0 is NaN. Caches start as zeros, and NaN is cleared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from dflash_trt.decoding.arrays import Arrays, Runner
from dflash_trt.decoding.caches import Caches, Snapshot
from dflash_trt.decoding.draft import Draft, Verified, chain_rows, tree_rows
from dflash_trt.decoding.drafter import USUAL_CONTEXT, Drafter
from dflash_trt.decoding.request import Request
from dflash_trt.errors import DFlashError


@dataclass(frozen=True)
class PassRule:
    """Which passes give a row the same bits. The default allows every pass, and promises nothing by itself.

    widths: numbers of rows of a sequence in a pass, ascending, that agree with each other. A pass with fewer rows than
        the last of them gets the next of these widths, by repeating its last row. Empty: no pass is padded.
    any_batch: whether a row is the same beside any other sequences, and at any place. If not, one sequence is decoded
        at a time.
    any_cut: whether a row is the same however its prompt was cut into passes, and whether the prompt's rows come from
        an answer. If not, only whole chunks of earlier prompts are reused.
    any_tree: whether the rows of an accepted path are the same wherever they lie in a tree. If not, chains are
        verified.
    """

    widths: tuple[int, ...] = ()
    any_batch: bool = True
    any_cut: bool = True
    any_tree: bool = True

    def padded(self, rows: int) -> int:
        """The rows of a pass for so many rows."""
        at = bisect_left(self.widths, rows)
        return self.widths[at] if at < len(self.widths) else rows

    @classmethod
    def read(cls, values: Any) -> Self:
        """The rule of these fields, from JSON. Raises DFlashError for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise DFlashError(f"a rule has the fields {', '.join(sorted(names))}")
        widths, others = values["widths"], [values[name] for name in sorted(names - {"widths"})]
        sound = isinstance(widths, list) and all(type(n) is int and n > 0 for n in widths)
        if not sound or widths != sorted(set(widths)) or any(type(flag) is not bool for flag in others):
            raise DFlashError("the values of a rule are ascending widths, true and false")
        return cls(**{**values, "widths": tuple(widths)})


FREE = PassRule()


class Pair:
    """Runs passes. It knows slots, positions and features, but nothing of sampling, stopping or scheduling.

    slots: the number of sequences. kept_slots: see `Caches`.
    capacity: the number of positions of each.
    prefill_chunk: the most tokens of a prompt in one `prefill`.
    rule: how the target's passes are padded.
    most_together: how many prompts one pass can read; 1 in exact mode.
    least_rows: the fewest rows of a target's pass, of all sequences together. Shorter passes are padded.
    equal_rows: whether, by the kernels of its products and layers, a row has the same bits in any decoding pass.
    products: the forms and tiles of these kernels, on which bits depend.
    """

    equal_rows = False
    products: Sequence[str] = ()

    def __init__(
        self,
        target: Runner,
        drafter: Runner | None,
        arrays: Arrays,
        *,
        slots: int,
        capacity: int,
        mask_token_id: int | None,
        vocab_size: int,
        prefill_chunk: int,
        prompt_pass: int | None = None,
        trees: bool = False,
        least_rows: int = 1,
    ) -> None:
        """prompt_pass: the most tokens of a prompt in one pass; None: `prefill_chunk`.
        trees: whether the target's graph takes the visibility among the rows of a pass.
        """
        self.trees, self._least_rows = trees, least_rows
        self.rule, self.most_together = FREE, arrays.most_together
        self.target, self.arrays, self.slots, self.capacity = target, arrays, slots, capacity
        self.vocab_size, self.prefill_chunk = vocab_size, prefill_chunk
        self._prompt_pass = prompt_pass or prefill_chunk
        self.kept_slots = min(runner.caches.kept_slots for runner in (target, drafter) if runner is not None)
        self.drafter = Drafter(
            drafter,
            arrays,
            slots=slots,
            kept_slots=self.kept_slots,
            capacity=capacity,
            mask_token_id=mask_token_id or 0,  # a target without a drafter has none, and no masks
            prefill_chunk=prefill_chunk,
        )
        self._features: Any = None  # of the last `verify`
        self._verified: tuple[Any, Any] = (0.0, 0.0)  # start and end of its pass

    @property
    def verify_time(self) -> float:
        """The engine's seconds in the last `verify`."""
        return self.arrays.seconds(*self._verified)

    def prefill(
        self, tokens: Sequence[int], start: int, slot: int, *, draft: bool, every_row: bool = False
    ) -> tuple[Any, bool, bool]:
        """Write the rows of `tokens` at positions start, start+1, ...; at most `prefill_chunk` of them.

        With `draft`, the drafter takes their features. Returns the logits of the last row, [1, V], a view; whether the
        features of all rows are finite, as the last row need not see them all; and whether the drafter's numbers are.
        With `every_row` the logits are those of all rows, [n, V], at most `arrays.most_prompt_rows`.
        """
        self.drafter.cut(slot, start if draft else 0)  # what the slot's previous request left
        sound, drafts_sound, end = list[Any](), list[Any](), start + len(tokens)
        # Passes end at multiples, wherever a reused prefix ends.
        ends = [] if every_row else [*range(start - start % self._prompt_pass, end, self._prompt_pass)][1:]
        for begin, stop in pairwise([start, *ends, end]):
            part = tokens[begin - start : stop - start]
            count, width = len(part), self._width(1, len(part))
            chunk = np.pad(np.array(part, np.int64), (0, width - count), mode="edge")[None]
            rows = np.arange(0 if every_row else count - 1, count)
            wanted = len(rows)
            rows = np.pad(rows, (0, max(self._least_rows - wanted, 0)), mode="edge")[None]
            feeds = {"tokens": chunk, "start": np.array([begin]), "rows": rows} | self._rows(1, width)
            out = self.arrays.prefill(self.target, feeds, slot)
            features = out["features"][:, :count]
            if draft:
                drafts_sound += self.drafter.take(features, begin, slot)
            sound.append(self.arrays.finite(features))
        logits, *finite = self.arrays.readable(out["logits"][0, :wanted], *sound, *drafts_sound)
        return logits, all(finite[: len(sound)]), all(finite[len(sound) :])

    def fits_together(self, counts: Sequence[int], starts: Sequence[int], most: int) -> bool:
        """Whether one pass can read so many tokens of several prompts from these positions on: `most` with padding."""
        width = self.arrays.prompt_width(max(counts))
        fits = max(starts) + width < self.capacity - self.arrays.most_unread
        return fits and len(counts) <= self.most_together and len(counts) * width <= most

    def prefill_together(
        self, prompts: Sequence[Sequence[int]], starts: Sequence[int], first_slot: int, *, draft: bool
    ) -> list[tuple[Any, bool, bool]]:
        """As `prefill`, of several prompts that fit together, in slots side by side. Returns the results of each."""
        counts, n = [len(prompt) for prompt in prompts], len(prompts)
        width = self.arrays.prompt_width(max(counts))
        for slot, start in enumerate(starts, first_slot):
            self.drafter.cut(slot, start if draft else 0)
        tokens = [np.pad(prompt, (0, width - len(prompt)), mode="edge") for prompt in prompts]
        feeds = {"tokens": np.stack(tokens), "start": np.array(starts), "rows": np.array(counts)[:, None] - 1}
        out = self.arrays.prefill(self.target, feeds | self._rows(n, width), first_slot)
        features = out["features"]
        drafts_sound = self.drafter.read(features, counts, starts, first_slot) if draft else []
        sound = [self.arrays.finite(features[i, :count]) for i, count in enumerate(counts)]
        logits, *finite = self.arrays.readable(out["logits"], *sound, *drafts_sound)
        truths = [bool(flag) for flag in finite] + [True] * n
        return list(zip(logits, truths[:n], truths[n:], strict=False))

    def verify(self, active: Sequence[Request], draft: Draft) -> Verified:
        """Run one target pass over the nodes of slots 0 .. n-1. Only a pair for `trees` takes trees."""
        return self.verified(active, draft, self.start(active, draft))

    def start(self, active: Sequence[Request], draft: Draft) -> Any:
        """Start the pass of `verify`. Returns what `verified` needs, before any other pass but that of `follow`."""
        feeds = self._feeds(draft.tokens, [request.committed for request in active], draft.parents)
        return self._start(active, draft, lambda: self.arrays.decode(self.target, feeds))

    def can_follow(self, active: Sequence[Request], nodes: int) -> bool:
        """Whether `follow` can come after a round of so many nodes that was started."""
        following = self.arrays.following
        return (
            following is not None
            and self.drafter.can_follow(active, nodes)
            and following.possible(active, nodes)
        )

    def follow(
        self, active: Sequence[Request], begun: Draft, texts: Mapping[int, Sequence[int]]
    ) -> tuple[Draft, Any]:
        """Start a round after that of a draft, before its result is known: the new draft, and what `verified` needs.
        `settle` must follow each commit of the last one. `Following` documents the arguments.
        """
        following = self.arrays.following
        assert following is not None
        draft = self.drafter.follow(following, active, begun, texts)
        return draft, self._start(active, draft, lambda: following.run_again(self.target))

    def settle(self, slot: int, committed: int, *, drafts: bool) -> int:
        """Count a round that follows, in a slot with so many committed tokens. Returns the features that it read.

        drafts: whether its drafter had a pass.
        """
        following, read = self.arrays.following, self.drafter.settle(slot) if drafts else None
        assert following is not None
        following.settle(slot, committed, read)
        return read or 0

    def _start(self, active: Sequence[Request], draft: Draft, run: Callable[[], Any]) -> Any:
        begin = self.arrays.now()
        out = run()
        self._verified = begin, self.arrays.now()
        self._features = out["features"]
        return self.arrays.verified(active, draft, out)

    def clock(self) -> Callable[[], tuple[float, float]]:
        """Gives the engines' seconds of the round that was started last, once it has ended: of the drafter's passes,
        and of the target's.
        """
        passes, verified, seconds = self.drafter.passes, self._verified, self.arrays.seconds
        return lambda: (sum([seconds(*points) for points in passes]), seconds(*verified))

    def verified(self, active: Sequence[Request], draft: Draft, outputs: Any) -> Verified:
        """The result of a pass that was started. Waits for it."""
        verified: Verified = outputs()
        padded = self._width(len(active), draft.nodes) > draft.nodes
        return _without_padding(verified, draft) if padded else verified

    def logits(
        self, tokens: Sequence[Sequence[int]], start: Sequence[int], parents: Any = None
    ) -> np.ndarray[Any, Any]:
        """The logits [n, N, V] of a target pass over N nodes of each of slots 0 .. n-1, written from start[i] on.

        parents: as in `Draft`. The pass is that of `verify`, without its verdict.
        """
        nodes = np.array(tokens, np.int64)
        out = self.arrays.decode(self.target, self._feeds(nodes, start, parents))
        return np.array(self.arrays.readable(out["logits"])[0])[:, : nodes.shape[1]]

    def commit(self, request: Request, slot: int, nodes: Sequence[int]) -> None:
        """Commit nodes of `slot` from the last verification: the anchor, then each the child of the previous one.

        They become the positions after the committed ones. The nodes of a chain are already there.
        """
        if nodes[-1] >= len(nodes):
            self.target.caches.compact(slot, request.committed, nodes)
        if request.takes_drafter:
            self.drafter.add_features(slot, self._features, nodes)

    def cut_lengths(self, slot: int, committed: int, *, draft: bool) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths to which a slot can be cut, of the target's caches and of the drafter's. Without `draft`, the
        latter is empty.
        """
        drafted = self.drafter.cut_lengths(slot) if draft else ()
        return self.target.caches.cut_lengths(slot, committed), drafted

    @property
    def tokens(self) -> int:
        """The tokens of all sequences together for which there is memory."""
        known = [caches.tokens for caches in self._both()]
        return min([count for count in known if count is not None], default=self.slots * self.capacity)

    @cached_property
    def scarce(self) -> bool:
        """Whether sequences may need more memory than there is."""
        return any(caches.tokens is not None for caches in self._both())

    @property
    def most_written(self) -> int:
        """The most rows of a slot that a round's pass writes after the committed ones."""
        return max(self.arrays.most_nodes, self.arrays.most_unread)

    def reserve(self, slot: int, length: int) -> bool:
        """Let a slot hold so many tokens, and what passes write after them. Returns whether there is memory."""
        return all(caches.reserve(slot, min(length, self.capacity)) for caches in self._both())

    def release(self, slot: int, length: int = 0) -> None:
        """Forget a slot's content from this length on. Its memory is free, unless slots have one size."""
        self.drafter.cut(slot, length)
        self.target.caches.release(slot, length)
        if self.drafter.present:
            self.drafter.caches.release(slot, self.drafter.seen[slot])

    def move(self, source: int, target: int, length: int, *, draft: bool) -> None:
        """As `copy`, and forget the first one's content."""
        for caches in self._caches(draft):
            caches.move(source, target, length)
        if not draft and self.drafter.present and self.scarce:
            self.drafter.caches.move(source, target, 0)

    def copy(self, source: int, target: int, length: int, *, draft: bool) -> None:
        """Give a slot the first `length` tokens of another one, which are one of its `cut_lengths`.

        draft: for both models, as in the methods below.
        """
        for caches in self._caches(draft):
            caches.copy(source, target, length)

    def mark(self, slot: int, length: int, shortest: int, *, draft: bool) -> None:
        """Let a slot be cut to lengths from `shortest` to its own also after it has gone on, or has moved to a further
        slot. Raises MemoryError if there is no memory.
        """
        for caches in self._caches(draft):
            caches.mark(slot, length, max(shortest, 1))

    def adopt(self, source: int, target: int) -> None:
        """Let a slot also be cut as another one, whose tokens are the beginning of its own."""
        for caches in self._both():
            caches.adopt(source, target)

    @property
    def marked_bytes(self) -> int:
        """Memory of what `mark` copied."""
        return sum(caches.marked_bytes for caches in self._both())

    def kept_bytes(self, length: int, *, draft: bool) -> int:
        """The most bytes of a copy of this many tokens; with `draft`, including the drafter's."""
        return sum(caches.kept_bytes(length) for caches in self._caches(draft))

    def keep(
        self, slot: int, start: int, stop: int, shortest: int, *, draft: bool, kept: Snapshot | None = None
    ) -> Snapshot:
        """Copy positions start .. stop-1 out of a slot, to restore lengths from `shortest` on.

        kept: an earlier copy of them, of which that is used again which lacks nothing. Raises MemoryError if there is
        no memory.
        """
        copies = [] if kept is None else list(kept.data)
        for i, caches in enumerate(self._caches(draft)):
            if kept is None or caches.lacks(slot, copies[i], shortest):
                copies[i : i + 1] = [caches.keep(slot, start, stop, shortest)]
        return _joined(copies)

    def lacks(self, slot: int, kept: Snapshot, shortest: int, *, draft: bool) -> bool:
        """Whether a copy lacks content that a slot has and that lengths from `shortest` on need."""
        both = zip(self._caches(draft), kept.data, strict=True)
        return any(caches.lacks(slot, copy, shortest) for caches, copy in both)

    def restore(self, slot: int, kept: Sequence[Snapshot], length: int, *, draft: bool) -> None:
        """Give a slot the first `length` tokens of adjacent copies from position 0 on.

        `length` is one of the last copy's `lengths`.
        """
        for i, caches in enumerate(self._caches(draft)):
            caches.restore(slot, [copy.data[i] for copy in kept], length)

    def clear(self, slot: int, first: int = 0) -> None:
        """Set the positions of a slot from `first` on to 0, in both models' caches."""
        self.target.caches.clear(slot, first)
        self.drafter.clear(slot, first)
        if first == 0:
            self.release(slot)

    def dummy_verify(self, batch: int, length: int, context: int = USUAL_CONTEXT) -> None:
        """As `Drafter.dummy_pass`, of the target. Tokens differ, so that they choose as many experts as real ones."""
        tokens = np.random.default_rng(length).integers(self.vocab_size, size=(batch, length))
        # Attention sinks take one row after those of the pass.
        start = [min(context, self.capacity - self._width(batch, length) - 1)] * batch
        self.arrays.decode(self.target, self._feeds(tokens, start))
        self.arrays.wait()

    def close(self) -> None:
        """Free both engines."""
        self.target.close()
        self.drafter.close()

    def _feeds(self, tokens: Any, start: Sequence[int], parents: Any = None) -> dict[str, Any]:
        """The inputs of a pass over nodes [n, N] of slots 0 .. n-1, which has `_width(n, N)` rows of each.

        The last node is repeated. Where the graph takes trees, the copies are its twins and see what it sees, so that
        they choose the same experts. In a chain they follow it.
        """
        count, nodes = tokens.shape
        width = self._width(count, nodes)
        if width > nodes and self.trees:
            chain = np.tile(np.arange(-1, nodes - 1), (count, 1)) if parents is None else np.asarray(parents)
            parents = np.pad(chain, ((0, 0), (0, width - nodes)), mode="edge")
        rows = self._rows(count, width, parents)
        return {"tokens": tokens, "start": np.array(start), "rows": self.arrays.nodes(count, width)} | rows

    def _width(self, count: int, nodes: int) -> int:
        """The rows of each of so many sequences in a pass over so many nodes of each: those that the rule and the
        engine's products want, in a width that the engine has prepared.
        """
        return self.arrays.width(max(self.rule.padded(nodes), -(-self._least_rows // count)))

    def _rows(self, count: int, nodes: int, parents: Any = None) -> dict[str, Any]:
        """The target's inputs about the rows of a pass, if its graph takes trees."""
        if not self.trees:
            if parents is not None:
                raise ValueError("the target's graph takes chains only, not trees")
            return {}
        return chain_rows(count, nodes) if parents is None else tree_rows(np.asarray(parents))

    def _both(self) -> list[Caches]:
        return [self.target.caches, *([self.drafter.caches] if self.drafter.present else [])]

    def _caches(self, draft: bool) -> list[Caches | Drafter]:
        both = draft and self.drafter.present
        return [self.target.caches, self.drafter] if both else [self.target.caches]


def _without_padding(verified: Verified, draft: Draft) -> Verified:
    """The result for the nodes of a draft, of a pass with copies of the last node after them.

    The engine's decision may go on into the copies. Then the token after the last node is that node's own.
    """
    last, accepted = np.asarray(draft.tokens)[:, -1], np.asarray(verified.accepted)
    verified.next_token = np.where(accepted < draft.nodes, verified.next_token, last)
    verified.accepted = np.minimum(accepted, draft.nodes - 1)
    return verified


def _joined(copies: Sequence[Snapshot]) -> Snapshot:
    """The copies of both models' caches, or of the target's alone, as one."""
    lengths = copies[0].lengths
    if any(copy.lengths != lengths for copy in copies):
        lengths = [n for n in lengths if all(n in copy.lengths for copy in copies)]
    size = sum(copy.size for copy in copies)
    return Snapshot(copies[0].start, copies[0].stop, lengths, copies, size)
