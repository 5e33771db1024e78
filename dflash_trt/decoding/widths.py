"""Check whether a row's logits depend on the width of its pass, on other sequences, or on how its prompt was read.

Drafts change the width of the target's passes. Tokens are the same with and without them only if a row has the same
logits in a pass of one row and in one of several, and many kernels do not give that. So the plain greedy answer of a
prompt, which runs one row a pass, is fed again in other ways, and all logits are compared bit for bit. No drafter runs.

`find_rule` makes a `PassRule` of the result, and measures again under it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dflash_trt.decoding.pair import FREE, Pair, PassRule
from dflash_trt.errors import UsageError
from dflash_trt.formats.numbers import cache_numbers

Array = np.ndarray[Any, Any]
# What may differ from plain decoding in a pass, and what may where no row's bits depend on the pass.
KINDS = "again", "widths", "batches", "cuts", "trees"
READ_AGAIN = "again", "cuts", "trees"
# Parts in which the prompt is read, at most: as common tiles have, and such as divide nothing.
PARTS = (64, 37, 5)


@dataclass(frozen=True, slots=True)
class Way:
    """How the tokens of an answer are fed.

    kind: what differs from plain decoding, if anything.
    widths: the rows of its passes; of a range, a random number in it for each pass.
    place, batch: its slot among so many sequences; of a range, a random number in it for each pass.
    part: the prompt is read in parts of so many tokens; 0: of the bundle's usual size.
    restored: the prompt's cache rows are a copy that was kept.
    reread: the first half of the answer is read as a part of the prompt. Only the rows after it are compared.
    """

    name: str
    kind: Literal["again", "widths", "batches", "cuts", "trees"]
    widths: range
    place: int = 0
    batch: range = range(1, 2)
    part: int = 0
    restored: bool = False
    reread: bool = False


@dataclass(slots=True)
class Outcome:
    """The rows of all prompts, fed in one way, beside those of plain decoding.

    rows: those compared. equal: those whose logits have the same bits. largest: the largest difference of a logit.
    flips: rows with another largest logit. margins: at the flips, how far the two largest logits of plain decoding
    are apart. answers: prompts with a flip. first: the first cache rows that differ, in words, if they were located.
    """

    way: Way
    rows: int = 0
    equal: int = 0
    largest: float = 0.0
    flips: int = 0
    margins: list[float] = field(default_factory=list)
    answers: int = 0
    first: str = ""
    digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way.name,
            "rows": self.rows,
            "equal": self.equal,
            "largest_difference": self.largest,
            "flips": self.flips,
            "margins_at_flips": self.margins,
            "answers_changed": self.answers,
            "first_difference": self.first,
        }


def ways(widths: Sequence[int], pair: Pair, kinds: Collection[str] = KINDS) -> list[Way]:
    """All ways of these kinds for passes of these widths. Plain decoding again comes first."""
    one, most, slots, chunk = range(1, 2), max(widths), pair.slots, pair.prefill_chunk
    listed = [Way("width 1 again", "again", one)]
    listed += [Way(f"width {width}", "widths", range(width, width + 1)) for width in widths if width > 1]
    mixed = [range(least, most + 1) for least in (1, 2) if most > least]
    listed += [Way(f"random widths, {span[0]} to {most}", "widths", span) for span in mixed]
    if slots > 1:
        batch = range(slots, slots + 1)
        listed += [
            Way(
                f"place {place + 1} of {slots}, width {width}",
                "batches",
                range(width, width + 1),
                place,
                batch,
            )
            for width in dict.fromkeys((1, most))
            for place in sorted({0, slots // 2, slots - 1})
        ]
        listed.append(
            Way(f"random batches, 1 to {slots}", "batches", range(1, most + 1), batch=range(1, slots + 1))
        )
    parts = dict.fromkeys(min(part, 1 + chunk // 2) for part in PARTS)
    listed += [Way(f"prompt in parts of {part}", "cuts", one, part=part) for part in parts]
    listed.append(Way("prompt from kept rows", "cuts", one, restored=True))
    listed.append(Way("half the answer as prompt", "cuts", one, reread=True))
    if pair.trees and most > 2:
        listed.append(Way(f"trees of {most} nodes", "trees", range(most, most + 1)))
    return [way for way in listed if way.kind in kinds]


def measure(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    widths: Sequence[int],
    max_tokens: int,
    manifest: Mapping[str, Any],
    *,
    locate: bool = False,
    kinds: Collection[str] = KINDS,
) -> Iterator[Outcome]:
    """Feed the plain greedy answers of the prompts, token ids, in every way. Yields each outcome when it is done.

    widths: rows of a pass, each at least 1 and at most the block length of the bundle.
    max_tokens: the most tokens of an answer.
    manifest: the bundle's.
    locate: whether outcomes name the first cache rows that differ, for which a prompt is fed twice more.
    kinds: of the ways.
    Overwrites rows of all slots. Raises UsageError for a width that a pass cannot have, or a prompt that leaves no room
    for an answer.
    """
    most, block_size = max(widths), manifest["block_size"]
    if min(widths) < 1 or most > block_size:
        raise UsageError(f"--widths: passes of this bundle have 1 to {block_size} rows, got {list(widths)}")
    room = manifest["max_seq_len"] - max(map(len, prompts))
    if room < 2:
        raise UsageError(f"the longest prompt leaves {room} tokens for an answer; use shorter prompts")
    eos = set(manifest["eos_token_ids"])
    feeders = [_Feeder(pair, prompt, min(max_tokens, room), eos) for prompt in prompts]
    plain = [feeder.plain() for feeder in feeders]
    for way in ways(widths, pair, kinds):
        outcome, digest = Outcome(way), hashlib.blake2b()
        for i, (feeder, expected) in enumerate(zip(feeders, plain, strict=True)):
            logits = feeder.feed(way, partner=feeders[i - 1])
            _add(outcome, logits, expected[-len(logits) :])
            digest.update(expected[: -len(logits)].tobytes())  # rows that were not fed again
            digest.update(logits.tobytes())
            if locate and outcome.equal < outcome.rows and not outcome.first:
                outcome.first = feeder.first_difference(way, partner=feeders[i - 1])
        outcome.digest = digest.hexdigest()
        yield outcome


def classes(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The ways whose logits agree bit for bit, the class of plain decoding first."""
    by_digest: dict[str, list[str]] = {}
    for outcome in outcomes:
        by_digest.setdefault(outcome.digest, []).append(outcome.way.name)
    return list(by_digest.values())


def find_rule(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    raw: Sequence[Outcome],
    manifest: Mapping[str, Any],
    tokens: int,
) -> PassRule | None:
    """The rule under which a row's bits are those of plain decoding under the same rule. None: there is none.

    raw: the outcomes of `measure` without a rule, for every width of a pass; or, where no row's bits depend on the
        pass, those of READ_AGAIN.
    tokens: the most tokens of an answer when it is measured under the rule.

    The widths are those that agree with the widest pass, so that drafts may fill a block. Under them all is measured
    again. Leaves the pair without a rule.
    """
    most = manifest["block_size"]
    if not any(outcome.way.kind == "widths" for outcome in raw):
        return _rule((), raw)
    by_width = {
        outcome.way.widths[0]: outcome
        for outcome in raw
        if outcome.way.kind in ("again", "widths") and len(outcome.way.widths) == 1
    }
    agreeing = tuple(n for n, outcome in by_width.items() if outcome.digest == by_width[most].digest)
    for widths in dict.fromkeys((agreeing, (most,))):
        outcomes = raw
        if len(widths) < len(by_width):
            pair.rule = PassRule(widths)
            outcomes = list(measure(pair, prompts, range(1, most + 1), tokens, manifest))
            pair.rule = FREE
        if (rule := _rule(widths, outcomes)) is not None:
            return rule
    return None


def _rule(widths: tuple[int, ...], outcomes: Sequence[Outcome]) -> PassRule | None:
    equal = dict.fromkeys(KINDS, True)
    for outcome in outcomes:
        equal[outcome.way.kind] &= outcome.equal == outcome.rows
    alike = equal["again"] and equal["widths"]
    return PassRule(widths, equal["batches"], equal["cuts"], equal["trees"]) if alike else None


def _add(outcome: Outcome, logits: Array, expected: Array) -> None:
    same = (logits.view(np.uint32) == expected.view(np.uint32)).all(axis=-1)
    outcome.rows += len(logits)
    outcome.equal += int(same.sum())
    if same.all():
        return
    outcome.largest = max(outcome.largest, float(np.abs(logits - expected).max()))
    flips = np.flatnonzero(logits.argmax(axis=-1) != expected.argmax(axis=-1))
    two = np.partition(expected[flips], -2, axis=-1)[:, -2:]
    outcome.flips += len(flips)
    outcome.margins += [float(high - low) for low, high in two]
    outcome.answers += len(flips) > 0


class _Feeder:
    """One prompt and its plain answer, on the slots of a pair."""

    def __init__(self, pair: Pair, prompt: Sequence[int], max_tokens: int, eos: set[int]) -> None:
        self.pair, self.prompt, self.max_tokens, self.eos = pair, list(prompt), max_tokens, eos
        self.answer: list[int] = []

    def plain(self) -> Array:
        """The logits [n, V] of plain decoding. Keeps its tokens."""
        logits = [self._prompt(0, 0)]
        while len(self.answer) < self.max_tokens and not (self.answer and self.answer[-1] in self.eos):
            self.answer.append(int(logits[-1].argmax()))
            start = len(self.prompt) + len(self.answer) - 1
            logits.append(self.pair.logits([self.answer[-1:]], [start])[0, 0])
        return np.stack(logits)

    def feed(self, way: Way, partner: _Feeder) -> Array:
        """The logits [n, V] of the same tokens, fed in this way: of all rows, or of the last ones."""
        n, slots = len(self.answer), range(way.batch[-1])
        done = n // 2 if way.reread else 0
        for slot in slots:
            if slot != way.place:
                partner._prompt(slot, 0)
        first = self._prompt(way.place, way.part, done)
        if way.restored:
            self._restore(way.place)
        logits, random = [first[None]], np.random.default_rng(n)
        beside = [0] * len(slots)  # rows that the partners have
        while done < n:
            width = int(random.choice(way.widths))
            if way.kind == "trees":
                logits.append(self._tree(way.place, done, width)[: n - done])
                done += len(logits[-1])
                continue
            tokens, starts = [], []
            for slot in range(int(random.choice(way.batch))):
                feeder, before = (self, done) if slot == way.place else (partner, beside[slot])
                tokens.append(feeder.tokens(before, width))
                starts.append(len(feeder.prompt) + before)
                beside[slot] += width
            logits.append(self.pair.logits(tokens, starts)[way.place, : n - done])
            done += width
        return np.concatenate(logits)

    def tokens(self, first: int, count: int) -> list[int]:
        """Tokens of the answer. Beyond its end they are a pass's other rows, which change none before them."""
        return (self.answer[first : first + count] + self.answer[-1:] * count)[:count]

    def _tree(self, slot: int, done: int, nodes: int) -> Array:
        """The logits of the next tokens as the even nodes of a tree. Each has a rejected sibling, but the first."""
        start, path = len(self.prompt) + done, list(range(0, nodes, 2))
        right = self.tokens(done, len(path) + 1)
        tokens, parents = [], []
        for node in range(nodes):
            wrong = node % 2
            tokens.append((right[(node + 1) // 2] + wrong) % self.pair.vocab_size)
            parents.append(node - 1 if wrong else max(node - 2, -1))
        logits = self.pair.logits([tokens], [start], np.array([parents]))[0, path]
        self.pair.target.caches.compact(slot, start, path)
        return logits

    def first_difference(self, way: Way, partner: _Feeder) -> str:
        """The first cache rows of the answer that differ from those of plain decoding, in words."""
        span = len(self.prompt), len(self.prompt) + len(self.answer)
        self.feed(Way("", "again", range(1, 2)), partner)
        plain = [(name, rows.copy()) for name, rows in cache_rows(self.pair, "target", 0, *span)]
        self.feed(way, partner)
        for (name, before), (_, after) in zip(
            plain, cache_rows(self.pair, "target", way.place, *span), strict=True
        ):
            if not np.array_equal(before, after):
                return name
        return "the logits: all cache rows agree"

    def _prompt(self, slot: int, part: int, answered: int = 0) -> Array:
        """Write the cache rows of the prompt, and of so many tokens of the answer. The logits [V] of the last token."""
        size = min(part or self.pair.prefill_chunk, self.pair.prefill_chunk)
        logits, tokens = np.empty(0), [*self.prompt, *self.answer[:answered]]
        for start in range(0, len(tokens), size):
            logits = self.pair.prefill(tokens[start : start + size], start, slot, draft=False)[0]
        return np.array(logits[-1])

    def _restore(self, slot: int) -> None:
        """Give the slot a kept copy of the prompt's rows, and run what the copy cannot hold."""
        length = self.pair.cut_lengths(slot, len(self.prompt), draft=False)[0][-1]
        kept = self.pair.keep(slot, 0, length, length, draft=False)
        self.pair.clear(slot)
        self.pair.restore(slot, [kept], length, draft=False)
        if length < len(self.prompt):
            self.pair.prefill(self.prompt[length:], length, slot, draft=False)


def cache_rows(pair: Pair, model: str, slot: int, start: int, stop: int) -> Iterator[tuple[str, Array]]:
    """Name and rows of each cache of `target` or `drafter`, layer by layer: positions start .. stop-1 of a slot.

    Layers with a window have those that the row after them sees.
    """
    caches: Any = (pair.target if model == "target" else pair.drafter).caches
    # Rows stand beside states, where there are states.
    rows = getattr(caches, "rows", caches).read(slot, start, stop)
    pair.arrays.wait()
    for name in sorted(rows, key=lambda cache_name: (int(cache_name.rpartition(".")[2]), cache_name)):
        cache = rows[name].cpu() if hasattr(rows[name], "cpu") else rows[name]
        if cache.dtype.itemsize == 1:
            yield name, cache_numbers(cache.numpy())
        else:
            yield name, np.asarray(cache.float() if hasattr(cache, "float") else cache, np.float32)
