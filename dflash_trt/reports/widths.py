"""Check whether a row's logits depend on the width of its pass, on other sequences, or on how its prompt was read.

Drafts change the width of the target's passes. Tokens are the same with and without them only if a row has the same
logits in a pass of one row and in one of several, and many kernels do not give that. So the plain greedy answer of a
prompt, which runs one row a pass, is fed again in other ways, and all logits are compared bit for bit. No drafter runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_trt.decoding.pair import Pair
from dflash_trt.errors import UsageError
from dflash_trt.llm import LLM
from dflash_trt.reports.localize import cache_rows

Array = np.ndarray[Any, Any]
# Cuts of the prompt: those of common tiles, and one that divides nothing.
PARTS = (64, 37)


@dataclass(frozen=True, slots=True)
class Way:
    """How the tokens of an answer are fed.

    widths: the rows of its passes; of a range, a random number in it for each pass.
    place, batch: its slot among so many sequences.
    part: the prompt is read in parts of so many tokens; 0: of the bundle's usual size.
    restored: the prompt's cache rows are a copy that was kept.
    tree: every second node of a pass is a draft that is rejected, so the answer's rows are moved together after it.
    """

    name: str
    widths: range
    place: int = 0
    batch: int = 1
    part: int = 0
    restored: bool = False
    tree: bool = False


@dataclass(slots=True)
class Outcome:
    """The rows of all prompts, fed in one way, beside those of plain decoding.

    rows: those compared. equal: those whose logits have the same bits. largest: the largest difference of a logit.
    flips: rows with another largest logit. margins: at the flips, how far the two largest logits of plain decoding
    are apart. answers: prompts with a flip. first: the first cache rows that differ, in words.
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


def ways(widths: Sequence[int], slots: int, *, trees: bool) -> list[Way]:
    """All ways for passes of these widths, with a bundle of so many slots. Plain decoding again comes first.

    trees: whether the bundle verifies trees.
    """
    most = max(widths)
    found = [Way("width 1 again", range(1, 2))]
    found += [Way(f"width {width}", range(width, width + 1)) for width in widths if width > 1]
    found += [
        Way(f"random widths, {least} to {most}", range(least, most + 1)) for least in (1, 2) if most > least
    ]
    if slots > 1:
        found += [
            Way(f"place {place + 1} of {slots}, width {width}", range(width, width + 1), place, slots)
            for width in dict.fromkeys((1, most))
            for place in sorted({0, slots // 2, slots - 1})
        ]
    found += [Way(f"prompt in parts of {part}", range(1, 2), part=part) for part in PARTS]
    found.append(Way("prompt from kept rows", range(1, 2), restored=True))
    if trees and most > 2:
        found.append(Way(f"trees of {most} nodes", range(most, most + 1), tree=True))
    return found


def measure(
    llm: LLM, prompts: Sequence[Sequence[int]], widths: Sequence[int], max_tokens: int
) -> Iterator[Outcome]:
    """Feed the plain greedy answers of the prompts, token ids, in every way. Yields each outcome when it is done.

    widths: rows of a pass, each at least 1 and at most the block length of the bundle.
    max_tokens: the most tokens of an answer.
    Raises UsageError for a width that a pass cannot have, or a prompt that leaves no room for an answer.
    """
    pair, most = llm._runtime.pair, max(widths)
    if min(widths) < 1 or most > llm.block_size:
        raise UsageError(
            f"--widths: passes of this bundle have 1 to {llm.block_size} rows, got {list(widths)}"
        )
    room = llm.max_seq_len - max(map(len, prompts))
    if room < 2:
        raise UsageError(f"the longest prompt leaves {room} tokens for an answer; use shorter prompts")
    eos = set(llm._runtime.bundle.manifest["eos_token_ids"])
    feeders = [_Feeder(pair, prompt, min(max_tokens, room), most, eos) for prompt in prompts]
    plain = [feeder.plain() for feeder in feeders]
    for way in ways(widths, pair.slots, trees=pair.trees):
        outcome, digest = Outcome(way), hashlib.blake2b()
        for i, (feeder, expected) in enumerate(zip(feeders, plain, strict=True)):
            logits = feeder.feed(way, partner=feeders[i - 1])
            _add(outcome, logits, expected)
            digest.update(logits.tobytes())
            if outcome.equal < outcome.rows and not outcome.first:
                outcome.first = feeder.first_difference(way, partner=feeders[i - 1])
        outcome.digest = digest.hexdigest()
        yield outcome


def classes(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """The ways whose logits agree bit for bit, the class of plain decoding first."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.digest, []).append(outcome.way.name)
    return list(found.values())


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
    """One prompt and its plain answer, on the slots of a pair. `most`: the largest width of a pass."""

    def __init__(self, pair: Pair, prompt: Sequence[int], max_tokens: int, most: int, eos: set[int]) -> None:
        self.pair, self.prompt, self.most, self.eos = pair, list(prompt), most, eos
        self.max_tokens = max_tokens
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
        """The logits [n, V] of the same tokens, fed in this way."""
        for place in range(way.batch):
            if place != way.place:
                partner._prompt(place, 0)
        first = self._prompt(way.place, way.part)
        if way.restored:
            self._restore(way.place)
        found, done, n = [first[None]], 0, len(self.answer)
        random = np.random.default_rng(n)
        while done < n:
            width = int(random.choice(way.widths))
            if way.tree:
                found.append(self._tree(way.place, done, width)[: n - done])
                done += len(found[-1])
                continue
            tokens, starts = [], []
            for place in range(way.batch):
                feeder = self if place == way.place else partner
                tokens.append(feeder.tokens(done, width))
                starts.append(len(feeder.prompt) + done)
            found.append(self.pair.logits(tokens, starts)[way.place, : n - done])
            done += width
        return np.concatenate(found)

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
        self.feed(Way("", range(1, 2)), partner)
        plain = [(name, rows.copy()) for name, rows in cache_rows(self.pair, "target", 0, *span)]
        self.feed(way, partner)
        for (name, before), (_, after) in zip(
            plain, cache_rows(self.pair, "target", way.place, *span), strict=True
        ):
            if not np.array_equal(before, after):
                return name
        return "the logits: all cache rows agree"

    def _prompt(self, slot: int, part: int) -> Array:
        """Write the prompt's cache rows. The logits [V] of its last token."""
        size = min(part or self.pair.prefill_chunk, self.pair.prefill_chunk)
        logits: Array = np.empty(0)
        for start in range(0, len(self.prompt), size):
            logits = self.pair.prefill(self.prompt[start : start + size], start, slot, draft=False)[0]
        return np.array(logits[-1])

    def _restore(self, slot: int) -> None:
        """Give the slot a kept copy of the prompt's rows, and run what the copy cannot hold."""
        length = self.pair.lengths(slot, len(self.prompt), draft=False)[0][-1]
        kept = self.pair.keep(slot, 0, length, length, draft=False)
        self.pair.clear(slot)
        self.pair.restore(slot, [kept], length, draft=False)
        if length < len(self.prompt):
            self.pair.prefill(self.prompt[length:], length, slot, draft=False)
