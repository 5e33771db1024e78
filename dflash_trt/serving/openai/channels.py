"""gpt-oss writes messages of several channels: reasoning in `analysis`, the answer in `final`, calls in `commentary`.

    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The format is that of OpenAI's Harmony (https://github.com/openai/harmony). The library `openai-harmony` reads the
tokens of one vocabulary, which it downloads. This reads the tokens of the bundle's own tokenizer, without a network.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from functools import lru_cache

from dflash_trt.decoding.output import Detokenizer
from dflash_trt.serving.openai.calls import Call
from dflash_trt.serving.openai.parsing import AnswerPart, Stage
from dflash_trt.text.tokenizer import Tokenizer

_MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_MOST_HEADER = 1000  # characters; a channel and a tool take fewer


class Channels:
    """A parser of answers in channels.

    prompt: the text of the prompt. It may end within a message's header, or after it. `calls`: reads calls in the
    text of `final`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, calls: Stage) -> None:
        self._tokenizer, self._calls = tokenizer, calls
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in _MARKERS}
        self._markers = {token: marker for marker, token in ids.items() if token is not None}
        head = prompt[prompt.rfind("<|start|>") + len("<|start|>") :] if "<|start|>" in prompt else ""
        self._header, body, _ = head.partition("<|message|>")
        self._in_body = bool(body)
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
            if self._in_body and _read(self._header)[0] == "analysis":
                self.reasoning_tokens += len(tokens)
            self._take(self._words.push(tokens))

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """The rest. cut: the answer was ended before its end, so the arguments of a call may lack theirs."""
        self._end_of_text()
        if self._in_body:
            self._waiting.append(("cut" if cut else "end", self._header))
        return [*self._due(), *self._calls.finish(cut=cut)]

    def _end_of_text(self) -> None:
        self._take(self._words.flush())
        self._words = Detokenizer(self._tokenizer.backend)

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._in_body:
            self._waiting.append((self._header, text))
        else:
            self._header += (
                text[: _MOST_HEADER - len(self._header)] if len(self._header) < _MOST_HEADER else ""
            )
            self._seen += len(text)

    def _mark(self, marker: str) -> None:
        if marker == "<|message|>":
            self._in_body = True
        elif marker in ("<|channel|>", "<|constrain|>") and not self._in_body:
            self._header += marker
        else:
            if self._in_body:
                self._waiting.append(("end", self._header))
            self._header, self._in_body = "", False

    def _due(self) -> Iterator[AnswerPart]:
        while self._waiting:
            header, text = self._waiting[0]
            if header in ("end", "cut"):
                self._waiting.popleft()
                yield from self._message_end(text, "{}" if header == "end" else "")
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
        channel, tool = _read(header)
        if tool:
            self._call.append(text)
        elif channel == "analysis":
            yield AnswerPart("reasoning", text)
        else:
            yield from self._calls.push(text)

    def _message_end(self, header: str, without: str) -> Iterator[AnswerPart]:
        """without: the arguments of a call that has none."""
        tool = _read(header)[1]
        if tool:
            yield AnswerPart("call", call=Call(tool, "".join(self._call).strip() or without))
            self._call = list[str]()


@lru_cache(maxsize=64)
def _read(header: str) -> tuple[str, str]:
    """The channel of a message, and the tool that it calls."""
    tool = re.search(r"to=(?:functions\.)?([\w.-]+)", header)
    channel = re.search(r"<\|channel\|>\s*(\w+)", header)
    return channel[1] if channel else "final", tool[1] if tool else ""
