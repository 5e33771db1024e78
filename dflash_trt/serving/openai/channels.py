"""gpt-oss writes messages of several channels: reasoning in `analysis`, the answer in `final`, calls in `commentary`.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Muse Glimmer's messages have a recipient instead: `self` for reasoning, `user` for the answer, or a tool.

    <|start|>assistant to=NAME<|message|><atem:function_calls>...</atem:function_calls><|eom|>

The format is that of OpenAI's Harmony (https://github.com/openai/harmony). The library `openai-harmony` reads the
tokens of one vocabulary, which it downloads. This reads the tokens of the bundle's own tokenizer, without a network.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from dflash_trt.decoding.output import Detokenizer
from dflash_trt.serving.openai.calls import Call, Schemas, muse_calls, parsed
from dflash_trt.serving.openai.parsing import AnswerPart, Stage
from dflash_trt.text.tokenizer import Tokenizer

_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_ENDS = ("<|eom|>", "<|eot|>")  # of Muse Glimmer's messages
# The end of a message's text that may be the header of another one, which Muse Glimmer sometimes begins there.
_HEADER = re.compile(r"(?:^|(?<=\s))(?:to?|to=[\w.-]*)\Z")
_ROLE = re.compile(r"\s*(?:assistant)?\s*(?:to=[\w.-]+)?\s*")  # of a header, without a mark before it
_MOST_HEADER = 1000  # characters; a channel and a tool take fewer


class Channels:
    """A parser of answers in channels. Text that is neither a message's header nor in its body is content.

    prompt: the text of the prompt. It may end within a message's header, or after it. `calls`: reads calls in the
    text of `final`. `schemas`: of the tools, where messages have recipients; None elsewhere.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: str, calls: Stage, schemas: Schemas | None = None
    ) -> None:
        self._tokenizer, self._calls, self._schemas = tokenizer, calls, schemas
        self._read, self._held = _read if schemas is None else _recipient, ""
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in (*_MARKERS, *_ENDS)}
        self._markers = {token: marker for marker, token in ids.items() if token is not None}
        head = prompt[prompt.rfind("<|start|>") + len("<|start|>") :] if "<|start|>" in prompt else ""
        self._header, body, _ = head.partition("<|message|>")
        self._in_body, self._outside = bool(body), ""  # generated text that may be of a header
        self._words = Detokenizer(tokenizer.backend)
        self._call = list[str]()
        # Stop strings cut the engine's text, but not its tokens. So no more characters are given out than it has.
        self._allowed = self._seen = 0
        self._waiting = deque[tuple[str, str]]()
        self.reasoning_tokens = 0

    def push(self, text: str, token_ids: list[int]) -> list[AnswerPart]:
        """The parts that a text and its tokens make certain."""
        self._allowed += len(text)
        run = list[int]()  # tokens between markers
        for token in token_ids:
            if (marker := self._markers.get(token)) is None:
                run.append(token)
            else:
                self._say(run)
                run = []
                self._end_of_text()
                self._mark(marker)
        self._say(run)
        return list(self._due())

    def _say(self, tokens: list[int]) -> None:
        if tokens:
            if self._in_body and self._read(self._header)[0] == "analysis":
                self.reasoning_tokens += len(tokens)
            self._take(self._words.push(tokens))

    def finish(self, begun: bool = False) -> list[AnswerPart]:
        """The parts that the end makes certain, by `Stage.finish`."""
        self._end_of_text()
        self._release()
        self._no_header()
        parts = [*self._due()]
        if self._in_body and not self._waiting:
            parts += self._message_end(self._header, cut=True, begun=begun)
        return [*parts, *self._calls.finish(begun)]

    def _end_of_text(self) -> None:
        self._take(self._words.flush())
        self._words = Detokenizer(self._tokenizer.backend)

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._in_body:
            text = self._held + text
            header = None if self._schemas is None else _HEADER.search(text)
            text, self._held = (text, "") if header is None else (text[: header.start()], header[0])
            if text:
                self._waiting.append((self._header, text))
        else:
            self._header += text[: max(_MOST_HEADER - len(self._header), 0)]
            self._outside += text
            self._seen += len(text)
            if len(self._outside) > _MOST_HEADER:
                self._no_header()

    def _release(self) -> None:
        """What was held back is no header."""
        if self._held:
            self._waiting.append((self._header, self._held))
            self._held = ""

    def _no_header(self) -> None:
        """Text outside of a body, which turns out to be no header, is for the user."""
        if self._outside:
            self._seen -= len(self._outside)
            self._waiting.append(("", self._outside))
            self._outside = ""

    def _mark(self, marker: str) -> None:
        if self._in_body and marker == "<|message|>" and self._held.startswith("to="):
            self._waiting.append(("end", self._header))
            self._header, self._held, self._seen = self._held, "", self._seen + len(self._held)
            return
        self._release()
        if "<|" not in self._header and not _ROLE.fullmatch(self._outside):
            self._no_header()
        if marker == "<|message|>":
            self._in_body, self._outside = True, ""
        elif marker in ("<|channel|>", "<|constrain|>") and not self._in_body:
            self._header += marker
        else:
            self._no_header()
            if self._in_body:
                self._waiting.append(("end", self._header))
            self._header, self._in_body = marker if marker == "<|start|>" else "", False

    def _due(self) -> Iterator[AnswerPart]:
        while self._waiting:
            header, text = self._waiting[0]
            if header == "end":
                self._waiting.popleft()
                yield from self._message_end(text)
                continue
            room = self._allowed - self._seen
            if room <= 0:
                return
            now = text[:room]
            self._seen += len(now)
            if len(now) < len(text):
                self._waiting[0] = header, text[room:]
            else:
                self._waiting.popleft()
            yield from self._part(header, now)

    def _part(self, header: str, text: str) -> Iterator[AnswerPart]:
        channel, tool = self._read(header)
        if tool:
            self._call.append(text)
        elif channel == "analysis":
            yield AnswerPart("reasoning", text)
        else:
            yield from self._calls.push(text)

    def _message_end(self, header: str, cut: bool = False, begun: bool = False) -> Iterator[AnswerPart]:
        """The calls of a message, or its text, where it is to a tool. cut: it ends without a mark."""
        tool = self._read(header)[1]
        if not tool:
            return
        text, self._call = "".join(self._call), list[str]()
        if self._schemas is not None:
            calls = muse_calls(text, self._schemas, begun)
        else:
            arguments = text.strip() or ("" if cut else "{}")
            whole = isinstance(parsed(arguments), dict)
            calls = [Call(tool, arguments, whole)] if whole or begun else []
        if calls:
            yield from (AnswerPart("call", call=call) for call in calls)
        elif text:
            yield AnswerPart("content", text)


@lru_cache(maxsize=64)
def _read(header: str) -> tuple[str, str]:
    """The channel of a message, and the tool that it calls."""
    tool = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
    channel = re.search(r"<\|channel\|>\s*(\w+)", header)
    return channel[1] if channel else "final", tool[1] if tool else ""


@lru_cache(maxsize=64)
def _recipient(header: str) -> tuple[str, str]:
    """The channel of a message that has a recipient, and the tool that it calls. Without one it is for the user."""
    found = re.search(r"to=([\w.-]+)", header)
    name = found[1] if found else "user"
    return ("analysis", "") if name == "self" else ("final", "" if name == "user" else name)
