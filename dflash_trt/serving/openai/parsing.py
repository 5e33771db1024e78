"""A chat's answer in parts: reasoning, content and calls of tools, from a stream of text and tokens.

An answer passes two stages: reasoning first, where the family has any, then calls in its content. channels.py has the
parser of gpt-oss, and written.py says which stages a model's chat template needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dflash_trt.serving.openai.calls import (
    Call,
    begins_json_call,
    cut_json_call,
    json_call,
    json_values,
    overlap,
)


@dataclass(frozen=True)
class AnswerPart:
    """Some text of one kind, or a call."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


class Stage:
    """Text in, parts out. `push` takes text as it comes, `finish` gives the rest. Here all text is content.

    cut: the answer was ended before its end. A call that has begun is then given as far as its arguments go, and
    nothing of it is content.
    """

    def push(self, text: str) -> Iterator[AnswerPart]:
        """The parts that are certain now."""
        if text:
            yield AnswerPart("content", text)

    def finish(self, *, cut: bool = False) -> Iterator[AnswerPart]:
        """The parts that the end makes certain."""
        return iter(())


class Think(Stage):
    """Reasoning between the marks `begin` and `end` at the beginning of an answer. The rest is content.

    inside: whether the prompt ends with `begin`.
    """

    def __init__(self, inside: bool, begin: str = "<think>", end: str = "</think>") -> None:
        self._begin, self._end = begin, end
        self._state: Literal["before", "inside", "trim", "after"] = "inside" if inside else "before"
        self._held, self.thought = "", inside

    @property
    def over(self) -> bool:
        """Whether there is no more reasoning. `thought`: whether there was any."""
        return self._state in ("trim", "after")

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Reasoning as soon as no end mark can be in it, and the content after that."""
        self._held += text
        if self._state == "before":
            start = self._held.lstrip()
            size = len(self._begin)
            if self._begin.startswith(start[:size]) and len(start) < size:
                return
            self._state = "inside" if start.startswith(self._begin) else "after"
            if self._state == "inside":
                self._held, self.thought = start[size:], True
        if self._state == "inside":
            yield from self._reason()
        if self._state == "trim":  # the line breaks after the tag are no content
            self._held = self._held.lstrip("\n")
            if self._held:
                self._state = "after"
        if self._state == "after" and self._held:
            yield AnswerPart("content", self._held)
            self._held = ""

    def _reason(self) -> Iterator[AnswerPart]:
        before, tag, rest = self._held.partition(self._end)
        if tag:
            self._state, self._held = "trim", rest
        else:
            keep = overlap(before, self._end)
            before, self._held = before[: len(before) - keep], before[len(before) - keep :]
        if before:
            yield AnswerPart("reasoning", before)

    def finish(self, *, cut: bool = False) -> Iterator[AnswerPart]:
        """What is held back, which is no mark."""
        if self._held and self._state != "trim":
            yield AnswerPart("reasoning" if self._state == "inside" else "content", self._held)
        self._held = ""


class MarkedCalls(Stage):
    """Calls between the marks `begin` and `end`. Without `end` a block goes on to the next `begin`.

    A block in which `read` sees no call stays content, with its marks. Blanks around calls are no content.
    """

    def __init__(self, begin: str, end: str, read: Callable[..., list[Call]]) -> None:
        self._begin, self._end, self._read = begin, end, read
        self._held, self._inside, self._after_call = "", False, False

    def push(self, text: str) -> Iterator[AnswerPart]:
        """The content before a mark, and each call when its block has ended."""
        self._held += text
        while True:
            mark = (self._end or self._begin) if self._inside else self._begin
            before, marked, rest = self._held.partition(mark)
            if self._inside:
                if not marked:
                    return
                yield from self._block(before, self._end)
                self._inside = not self._end
            else:
                # Blanks may belong to a call, so those at the end wait for what follows them.
                shown = (before if marked else before[: len(before) - overlap(before, mark)]).rstrip()
                if content := shown.lstrip() if self._after_call else shown:
                    self._after_call = False
                    yield AnswerPart("content", content)
                rest = rest if marked else before[len(shown) :]
                self._inside = bool(marked)
            self._held = rest
            if not marked:
                return

    def _block(self, text: str, end: str, *, cut: bool = False) -> Iterator[AnswerPart]:
        calls = self._read(text, cut=cut)
        self._after_call = bool(calls)
        for call in calls:
            yield AnswerPart("call", call=call)
        if not calls and not cut:
            yield AnswerPart("content", f"{self._begin}{text}{end}")

    def finish(self, *, cut: bool = False) -> Iterator[AnswerPart]:
        """A block without an end may be a call; the beginning of a mark is none."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", False
        if inside:  # the end mark alone may be missing
            yield from self._block(held[: len(held) - overlap(held, self._end)] if cut else held, "", cut=cut)
            return
        # Of a cut answer, but a single < is rarely the beginning of a mark.
        if cut and (size := overlap(held, self._begin)) > 1:
            held = held[: len(held) - size]
        if content := held.lstrip() if self._after_call else held:
            yield AnswerPart("content", content)


class BareCalls(Stage):
    """An answer that is nothing but JSON objects with a name and parameters, perhaps separated by semicolons.

    known: names of the tools, if a call must have one of them.
    """

    def __init__(self, known: Iterable[str] | None = None) -> None:
        self._held, self._content = "", False
        self._known = None if known is None else frozenset(known)

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Nothing while the text may be a call; then all of it is content."""
        self._held += text
        start = self._held.lstrip().removeprefix("<|python_tag|>").lstrip()
        may_call = not start or start[0] in "{[" or "<|python_tag|>".startswith(start)
        self._content = self._content or not may_call
        if self._content and self._held:
            yield AnswerPart("content", self._held)
            self._held = ""

    def finish(self, *, cut: bool = False) -> Iterator[AnswerPart]:
        """The calls, if the text is nothing else; otherwise it is content."""
        values, rest = json_values(self._held.strip().removeprefix("<|python_tag|>"))
        rest = rest.removeprefix("[") if cut else rest
        calls = [call for value in values if (call := self._known_call(value))]
        begun = bool(rest) and cut and begins_json_call(rest, self._known)
        if len(calls) == len(values) and (begun if rest else calls):
            if begun and (last := cut_json_call(rest)):
                calls.append(last)
            for call in calls:
                yield AnswerPart("call", call=call)
        elif self._held:
            yield AnswerPart("content", self._held)
        self._held = ""

    def _known_call(self, value: Any) -> Call | None:
        call = json_call(value)
        return call if call and (self._known is None or call.name in self._known) else None


@dataclass
class AnswerParser:
    """Parts of an answer in two stages.

    think: None in families without reasoning. end_of_thought: the token that ends the reasoning, if it is one.
    reasoning_tokens: those of the reasoning so far, with its tags.
    """

    think: Think | None
    calls: Stage
    end_of_thought: int | None = None
    reasoning_tokens: int = 0

    def push(self, text: str, token_ids: list[int]) -> list[AnswerPart]:
        """The parts that a text and its tokens make certain."""
        think, end = self.think, self.end_of_thought
        if think is None:
            return list(self.calls.push(text))
        before = think.over
        parts = list(self._content(think.push(text)))
        if think.thought and not before:
            if think.over and end is not None and end in token_ids:
                token_ids = token_ids[: token_ids.index(end) + 1]
            self.reasoning_tokens += len(token_ids)
        return parts

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """The rest. cut: as in `Stage`."""
        rest = self.think.finish(cut=cut) if self.think else ()
        return [*self._content(rest), *self.calls.finish(cut=cut)]

    def _content(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        for part in parts:
            if part.kind == "content":
                yield from self.calls.push(part.text)
            else:
                yield part
