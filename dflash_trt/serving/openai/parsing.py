"""A chat's answer in parts: reasoning, content and calls of tools, from a stream of text and tokens.

An answer passes two stages: reasoning first, where the family has any, then calls in its content. Each takes time in
proportion to the text. channels.py has the parser of gpt-oss, and written.py says which stages a model's chat template
needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from dflash_trt.serving.openai.calls import (
    Call,
    Schemas,
    json_begun,
    json_call,
    json_values,
    overlap,
    tags_end,
)


@dataclass(frozen=True)
class AnswerPart:
    """Some text of one kind, or a call."""

    kind: Literal["content", "reasoning", "call"]
    text: str = ""
    call: Call | None = None


BARE = "<|python_tag|>"  # may stand before objects that are calls
_MOST_BEGIN = 200  # characters after a begin mark, of which fewer show a call


@dataclass(frozen=True)
class Notation:
    """How a family marks calls.

    kind: what a block with this beginning is: "json" or "tags", where texts may have marks, or "other"; "" is no call,
    and None needs more. read: the calls of a block; with True, of one that is cut.
    """

    begin: str
    end: str
    kind: Callable[[str], str | None]
    read: Callable[[str, Schemas, bool], list[Call]]

    def begins(self, text: str) -> bool | None:
        """Whether what follows a begin mark is a call; None: more is needed."""
        kind = self.kind(text[:_MOST_BEGIN].lstrip())
        return None if kind is None and len(text) < _MOST_BEGIN else bool(kind)


class Stage:
    """Text in, parts out. `push` takes text as it comes, `finish` gives the rest. Here all text is content.

    A call without an end, as where `max_tokens` cuts it, is content, unless the answer had to be a call.
    """

    def push(self, text: str) -> Iterator[AnswerPart]:
        """The parts that are certain now."""
        if text:
            yield AnswerPart("content", text)

    def finish(self, begun: bool = False) -> Iterator[AnswerPart]:
        """The parts that the end makes certain. begun: a call whose arguments are cut is one, by what there is."""
        return iter(())


class Think(Stage):
    """Reasoning between the marks `begin` and `end` at the beginning of an answer. The rest is content.

    A call ends the reasoning, too, because models that call sometimes leave a thought open.
    inside: whether the prompt ends with `begin`. notation: that of calls.
    """

    def __init__(
        self, inside: bool, begin: str = "<think>", end: str = "</think>", notation: Notation | None = None
    ) -> None:
        self._begin, self._end, self._notation = begin, end, notation
        # Whether a call ended the reasoning, and how often its mark stood there without a call.
        self.called, self.mentions = False, 0
        self._state: Literal["before", "inside", "trim", "after"] = "inside" if inside else "before"
        self._blanks, self._held, self.thought = list[str](), "", inside

    @property
    def over(self) -> bool:
        """Whether there is no more reasoning. `thought`: whether there was any."""
        return self._state in ("trim", "after")

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Reasoning as soon as no end mark can be in it, and the content after that."""
        if self._state == "before" and not self._held:
            rest = text.lstrip()
            self._blanks.append(text[: len(text) - len(rest)])
            text = rest
        self._held += text
        if self._state == "before":
            if self._begin.startswith(self._held) and self._held != self._begin:
                return
            self.thought = self._held.startswith(self._begin)
            self._state = "inside" if self.thought else "after"
            self._held = (
                self._held[len(self._begin) :] if self.thought else "".join(self._blanks) + self._held
            )
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
        text, end = self._held, self._held.find(self._end)
        call, begins = self._call(text if end < 0 else text[:end])
        if begins:
            self._state, self.called, stop, rest = "after", True, call, call
        elif end >= 0:
            self._state, stop, rest = "trim", end, end + len(self._end)
        else:
            stop = rest = min(call, len(text) - overlap(text, self._end))
        if stop:
            yield AnswerPart("reasoning", text[:stop])
        self._held = text[rest:]

    def _call(self, text: str) -> tuple[int, bool]:
        """Where a call begins, or may begin, in a text, which is its length if nowhere, and whether it does."""
        if self._notation is None:
            return len(text), False
        mark, at = self._notation.begin, 0
        while (at := text.find(mark, at)) >= 0:
            after = at + len(mark)
            begins = self._notation.begins(text[after : after + _MOST_BEGIN])
            if begins is not False:
                return at, bool(begins)
            self.mentions += 1
            at = after
        return len(text) - overlap(text, mark), False

    def finish(self, begun: bool = False) -> Iterator[AnswerPart]:
        """What is held back, which is no mark."""
        if self._state == "before":
            self._held = "".join(self._blanks) + self._held
        if self._held and self._state != "trim":
            yield AnswerPart("reasoning" if self._state == "inside" else "content", self._held)
        self._held = ""


class MarkedCalls(Stage):
    """Calls between the marks of a notation. Where it has no end mark, a block goes on to the next begin.

    A block in which no call is seen stays content, with its marks and the blanks before it; it is given as soon as its
    first characters show that. Blanks around calls are no content. A mark within a text of JSON, or within a value of
    Qwen3-Coder's tags, is a part of it.
    """

    def __init__(self, notation: Notation, schemas: Schemas) -> None:
        self.notation, self._schemas = notation, schemas
        self._mark = notation.begin  # what ends the present block or content
        self._text = ""  # of the mark, or of what tells what a block is: a few characters that wait for more
        self._blanks, self._block = list[str](), list[str]()
        self._inside, self._after_call = False, False
        # Of a block that may be a call: whether a mark may end it.
        self._scan: Callable[[str], bool] | None = None

    def push(self, text: str) -> Iterator[AnswerPart]:
        """The content before a mark, and each call when its block has ended."""
        text, self._text = self._text + text, ""
        while text:
            if self._inside and self._scan is None and (text := self._begun(text)) == "":
                return
            at = text.find(self._mark)
            before = text[: at if at >= 0 else len(text) - overlap(text, self._mark)]
            rest = text[len(before) + len(self._mark) :] if at >= 0 else ""
            if at < 0:
                self._text = text[len(before) :]
            if not self._inside:
                yield from self._content(before)
                self._inside = at >= 0
                self._mark = (self.notation.end or self.notation.begin) if self._inside else self._mark
            else:
                assert self._scan is not None
                ends = self._scan(before)
                self._block.append(before)
                if at >= 0 and ends:
                    yield from self._ended(self.notation.end)
                    self._inside = not self.notation.end
                    self._mark = (
                        self.notation.end or self.notation.begin if self._inside else self.notation.begin
                    )
                elif at >= 0:
                    self._scan(self._mark)
                    self._block.append(self._mark)
            text = rest

    def _begun(self, text: str) -> str:
        """Look at the beginning of a block. Returns what is to be read on with; nothing if more is needed."""
        if not (start := text.lstrip()):
            self._block.append(text)
            return ""
        kind = self.notation.kind(start)
        if kind is None and len(start) < _MOST_BEGIN:
            self._text = text
            return ""
        if kind:
            self._scan = _Tags() if kind == "tags" else _Quotes() if kind == "json" else lambda _: True
            return text
        # No call: the mark is content.
        self._inside, self._mark = False, self.notation.begin
        self._blanks.append(self.notation.begin + "".join(self._block))
        self._block, self._after_call = [], False
        return text

    def _content(self, text: str) -> Iterator[AnswerPart]:
        """Blanks may belong to a call, so those at the end wait for what follows them."""
        shown = text.rstrip()
        if shown or "".join(self._blanks[-1:]).strip():
            whole = "".join(self._blanks) + shown
            self._blanks.clear()
            if content := whole.lstrip() if self._after_call else whole:
                self._after_call = False
                yield AnswerPart("content", content)
        self._blanks.append(text[len(shown) :])

    def _ended(self, end: str, cut: bool = False, begun: bool = False) -> Iterator[AnswerPart]:
        """The calls of a block, or its text. end: what follows the block. cut: that is not its end mark."""
        text = "".join(self._block)
        ended = not (cut and isinstance(self._scan, _Tags)) or tags_end(text)
        self._block, self._scan = [], None
        calls = self.notation.read(text, self._schemas, False) if ended else []
        if begun and not calls:
            calls = self.notation.read(text + end, self._schemas, True)
        if calls:
            self._blanks, self._after_call = [], True
            for call in calls:
                yield AnswerPart("call", call=call)
        else:
            whole = "".join(self._blanks) + self.notation.begin + text + end
            self._blanks = []
            yield AnswerPart("content", whole.lstrip() if self._after_call else whole)
            self._after_call = False

    def finish(self, begun: bool = False) -> Iterator[AnswerPart]:
        """A block may lack its end mark, or the end of that; the beginning of another mark is none."""
        held, self._text = self._text, ""
        if self._inside:
            yield from self._ended(held, cut=True, begun=begun)
            self._inside = False
            return
        content = "".join(self._blanks) + held
        if content := content.lstrip() if self._after_call else content:
            yield AnswerPart("content", content)


class _Quotes:
    """Whether a mark after some JSON is outside of its texts. A line break ends a text: JSON has none within."""

    _STEP = re.compile(r'\\.|["\n\\]', re.DOTALL)

    def __init__(self) -> None:
        self._within = self._escaped = False

    def __call__(self, text: str) -> bool:
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        for found in self._STEP.finditer(text, at):
            if found[0] == '"':
                self._within = not self._within
            elif found[0] == "\n":
                self._within = False
            elif found[0] == "\\":  # at the end of the piece
                self._escaped = True
        return not self._within


class _Tags:
    """Whether a mark after some of Qwen3-Coder's tags follows the end of one."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, text: str) -> bool:
        if shown := text[-200:].rstrip() or text.rstrip():
            self._last = (self._last + shown)[-len("</parameter>") :]
        return self._last.endswith(("</function>", "</parameter>"))


class BareCalls(Stage):
    """An answer that is nothing but JSON objects with the name of a tool and parameters, perhaps between semicolons."""

    def __init__(self, known: Iterable[str]) -> None:
        self._held, self._begin = list[str](), ""
        self._state: Literal["begin", "may be", "content"] = "begin"
        self._known = frozenset(known)

    def push(self, text: str) -> Iterator[AnswerPart]:
        """Nothing while the text may be a call; then all of it is content."""
        self._held.append(text)
        if self._state == "begin":
            self._begin = (self._begin + text).lstrip()
            start = self._begin.removeprefix(BARE).lstrip()
            self._begin = self._begin if start else self._begin.rstrip()
            if start and not BARE.startswith(self._begin):
                self._state = "may be" if start[0] in "{[" else "content"
        if self._state == "content" and (content := "".join(self._held)):
            self._held.clear()
            yield AnswerPart("content", content)

    def finish(self, begun: bool = False) -> Iterator[AnswerPart]:
        """The calls, if the text is nothing else; otherwise it is content."""
        text = "".join(self._held)
        self._held.clear()
        values, rest = json_values(text.strip().removeprefix(BARE))
        calls = [call for value in values if (call := json_call(value)) and call.name in self._known]
        whole = len(calls) == len(values)
        if begun and rest:
            calls += (last := json_begun(rest))
            rest = "" if last else rest
        if calls and whole and not rest:
            yield from (AnswerPart("call", call=call) for call in calls)
        elif text:
            yield AnswerPart("content", text)


@dataclass
class AnswerParser:
    """Parts of an answer in two stages.

    think: None in families without reasoning. end_of_thought, begin_of_call: the tokens of the marks that end the
    reasoning, if each is one. reasoning_tokens: those of the reasoning so far, with its tags.
    """

    think: Think | None
    calls: Stage
    end_of_thought: int | None = None
    begin_of_call: int | None = None
    reasoning_tokens: int = 0
    _ids: list[int] = field(default_factory=list)  # until the reasoning is over

    def push(self, text: str, token_ids: list[int]) -> list[AnswerPart]:
        """The parts that a text and its tokens make certain."""
        if (think := self.think) is None:
            return list(self.calls.push(text))
        before = think.over
        parts = list(self._content(think.push(text)))
        if not before:
            self._ids += token_ids
            self.reasoning_tokens = self._reasoned(think) if think.thought else 0
        return parts

    def _reasoned(self, think: Think) -> int:
        """The tokens of the reasoning: up to its end mark, or before the call that ended it."""
        mark, skipped = (self.begin_of_call, think.mentions) if think.called else (self.end_of_thought, 0)
        places = [at for at, token in enumerate(self._ids) if token == mark] if think.over else []
        return places[skipped] + (not think.called) if skipped < len(places) else len(self._ids)

    def finish(self, begun: bool = False) -> list[AnswerPart]:
        """The parts that the end makes certain, by `Stage.finish`."""
        rest = self.think.finish() if self.think else ()
        return [*self._content(rest), *self.calls.finish(begun)]

    def _content(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        for part in parts:
            if part.kind == "content":
                yield from self.calls.push(part.text)
            else:
                yield part
