"""From token ids to text, and the end of an answer."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import tokenizers

from dflash_trt.decoding.params import FinishReason, SamplingParams


class Automaton:
    """Patterns as states. A state is the longest suffix of the input that begins a pattern; state 0 is empty.

    Equal patterns share a state. An empty pattern ends at every state.
    """

    def __init__(self, patterns: Iterable[Iterable[int]]) -> None:
        self._next: dict[int, int] = {}  # key: state << 32 | symbol
        self.depth = array("i", [0])  # symbols of each state
        self.state_of = [self._add(pattern) for pattern in patterns]  # the end state of each pattern
        ends = set(self.state_of)
        # The longest other state that is a suffix of a state.
        self._shorter = array("i", [0]) * len(self.depth)
        # The state of the longest pattern that ends at a state; -1 if there is none.
        self.longest = array("i", [0 if 0 in ends else -1]) * len(self.depth)
        for key, longer in sorted(self._next.items(), key=lambda entry: self.depth[entry[1]]):
            if state := key >> 32:
                self._shorter[longer] = self.step(self._shorter[state], key & 0xFFFFFFFF)
            self.longest[longer] = longer if longer in ends else self.longest[self._shorter[longer]]

    def step(self, state: int, symbol: int) -> int:
        """The state after one more symbol."""
        while (longer := self._next.get(state << 32 | symbol)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return longer

    def ending(self, state: int) -> Iterator[int]:
        """The states of the patterns that end here, longest first."""
        state = self.longest[state]
        while state >= 0:
            yield state
            state = self.longest[self._shorter[state]] if state else -1

    def _add(self, pattern: Iterable[int]) -> int:
        state = 0
        for symbol in pattern:
            longer = self._next.setdefault(state << 32 | symbol, len(self.depth))
            if longer == len(self.depth):
                self.depth.append(self.depth[state] + 1)
            state = longer
        return state


_REPLACEMENT = "\ufffd"  # the decoding of bytes that are not (yet) a character
# A character has at most 4 bytes and a token at least one. Tokens further back no longer matter.
_REACH = 8
# Tokens after which the middle of the pending ones is dropped: more is slower, fewer is not faster.
_MOST_PENDING = 32
_HELD = 3  # replacement characters at the end that the next token may complete


class Detokenizer:
    """The text of one request, in pieces, without special tokens unless `skip_special` is false.

    `push(a) + push(b) + ... + flush()` equals `decode(a + b + ...)` for every byte-level tokenizer and any tokens.
    With byte-fallback tokenizers this holds for well-formed text. There, a wrong byte turns the characters directly
    before it into replacement characters when everything is decoded at once; here they have already been emitted. The
    time of a push does not depend on the earlier tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        # Decoding a token can depend on earlier ones (bytes of one character; a space at the start of a text). The
        # window starts with complete, emitted characters as context.
        self._window: list[int] = []
        self._text = ""
        self._shown = 0  # emitted characters of self._text
        self._context_end = 0  # tokens of the window whose text was completely emitted at the last cut

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain; "" while a character is incomplete."""
        window = [*self._window, *tokens]
        text = self._tokenizer.decode(window, skip_special_tokens=self._skip)
        if text.endswith(_REPLACEMENT) and len(tokens) > 1:  # find the end of its complete characters
            return "".join([self.push((token,)) for token in tokens])
        end = len(text.rstrip(_REPLACEMENT))
        long = len(window) - self._context_end > _MOST_PENDING
        if long and end < len(text):
            end = max(end, len(text) - _HELD)
        piece = text[self._shown : end]
        self._window, self._text, self._shown = window, text, max(self._shown, end)
        if piece and end == len(text):
            self._cut()
        elif long:
            self._shorten()
        return piece

    def flush(self) -> str:
        """The rest of the text at the end. Bytes of an incomplete character become U+FFFD."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece

    def special(self, token: int) -> str:
        """The text of a special token that is left out; "" for every other token."""
        skipped = self._skip and not self._tokenizer.decode((token,))
        return self._tokenizer.decode((token,), skip_special_tokens=False) if skipped else ""

    def _cut(self) -> None:
        """Cut the window after all text was emitted in complete characters. The tokens since the last cut are enough
        context.
        """
        window = self._window[self._context_end :]
        if context := self._tokenizer.decode(window, skip_special_tokens=self._skip):
            self._window, self._context_end = window, len(window)
            self._text, self._shown = context, len(context)

    def _shorten(self) -> None:
        """Shorten tokens that have made no complete text for long.

        The first ones stay, because they show whether a text has started. The last ones stay, because their bytes may
        become a character.
        """
        begun = self._context_end
        pending = [token for token in self._window[begun:] if not self._is_silent(token)]
        if len(pending) > 2 * _REACH:
            pending = [*pending[:_REACH], *pending[-_REACH:]]
        window = [*self._window[:begun], *pending]
        text, rest = self._tokenizer.decode(window, skip_special_tokens=self._skip), self._text[self._shown :]
        if text.endswith(rest):
            self._window, self._text, self._shown = window, text, len(text) - len(rest)

    def _is_silent(self, token: int) -> bool:
        """Whether decoding skips this token: a special token, or an unknown id."""
        decode = self._tokenizer.decode
        return not decode((token,), skip_special_tokens=self._skip) and bool(
            self._tokenizer.id_to_token(token) is None or decode((token,), skip_special_tokens=False)
        )


class StoppedText(NamedTuple):
    """The result of some tokens: the first `kept` of them count, and `text` may be shown now."""

    kept: int
    text: str
    finish_reason: FinishReason | None


class StopChecker:
    """Stop tokens, stop strings and the token budget of one request. The result does not depend on how tokens are
    grouped.

    As in vLLM, a stop token is kept but has no text. The token that completes a stop string is kept, and the text
    ends before the string. With `include_stop_str_in_output` both are in the text. The stop string that is complete
    first ends the text; the longest one, if two end together. A stop takes precedence over `max_tokens` if one token
    reaches both. A stop string that is complete within the first `min_tokens` tokens does not count, nor does one
    between the marks of `stop_outside`.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Iterable[int], detokenizer: Detokenizer
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.end_tokens = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self._stops = Automaton(map(ord, stop) for stop in params.stop) if params.stop else None
        self._marks = _Marks(params.stop_outside) if params.stop and params.stop_outside else None
        # Of a complete stop string in the held text: where the kept text ends, and where the stop string ends.
        self._complete: tuple[int, int] | None = None
        self._included = params.include_stop_str_in_output
        self._state = 0  # the part of a stop string at the end of the held text
        self.remaining = params.max_tokens  # tokens that may still be kept
        self._detokenizer = detokenizer
        self._early = params.min_tokens  # tokens that may still not end the text
        self._held = ""  # decoded, but possibly the start of a stop string

    def push(self, tokens: Sequence[int]) -> StoppedText:
        """Take the next tokens. After the end, none are kept."""
        if self.finish_reason:
            return StoppedText(0, "", self.finish_reason)
        kept = min(len(tokens), self.remaining)
        reason: FinishReason | None = "length" if kept == self.remaining else None
        spoken = tokens[:kept]
        if not self.end_tokens.isdisjoint(spoken):
            first = next(i for i, token in enumerate(spoken) if token in self.end_tokens)
            kept, reason, spoken = first + 1, "stop", tokens[: first + self._included]
        if self._stops is None:
            text = self._detokenizer.push(spoken)
            if reason:
                text += self._detokenizer.flush()
        else:
            text, matched = self._match(self._stops, spoken, last=reason is not None)
            if matched is not None:
                kept, reason = matched or kept, "stop"
        self.remaining -= kept
        self.finish_reason = reason
        return StoppedText(kept, text, reason)

    def abandon(self, reason: FinishReason) -> str:
        """End the request from outside. Returns the text that was held back."""
        if self.finish_reason:
            return ""
        self.finish_reason = reason
        return self._held + self._detokenizer.flush()

    def _match(self, stops: Automaton, tokens: Sequence[int], last: bool) -> tuple[str, int | None]:
        """The text to show, and the number of tokens that complete a stop string (0: the flush at the end completes
        it).
        """
        for count, token in enumerate(tokens, 1):
            self._early -= 1
            if self._marks is not None:
                hidden = [self._marks.hides(character) for character in self._detokenizer.special(token)]
                self._state = 0 if any(hidden) else self._state
            if (end := self._hold(stops, self._detokenizer.push((token,)))) is not None:
                return self._held[:end], count
        if last:
            end = self._hold(stops, self._detokenizer.flush())
            if end is None and self._complete is not None:
                end = self._complete[0]
            return self._held[:end], None if end is None else 0
        safe = len(self._held) - stops.depth[self._state]
        if self._complete is not None:
            safe = min(safe, self._complete[0])
            self._complete = self._complete[0] - safe, self._complete[1] - safe
        text, self._held = self._held[:safe], self._held[safe:]
        return text, None

    def _hold(self, stops: Automaton, text: str) -> int | None:
        """Hold more text. Returns where the text ends, if the held text has a complete stop string that counts."""
        before = len(self._held)
        self._held += text
        for end, character in enumerate(text, before + 1):
            if self._marks is not None and self._marks.hides(character):
                self._state, self._complete = 0, None
                continue
            self._state = stops.step(self._state, ord(character))
            state = stops.longest[self._state]
            if state >= 0 and self._early < 0 and self._complete is None:
                self._complete = end if self._included else end - stops.depth[state], end
            # A stop string within what may become a mark waits for it.
            mark = 0 if self._marks is None else self._marks.depth
            if self._complete is not None and end - mark >= self._complete[1]:
                return self._complete[0]
        return None


class _Marks:
    """Whether a text is between the marks of a pair, character by character."""

    def __init__(self, pairs: Sequence[Sequence[str]]) -> None:
        marks = [mark for pair in pairs for mark in pair]
        self._marks = Automaton(map(ord, mark) for mark in marks)
        states = self._marks.state_of
        self._end_of = dict(zip(states[::2], states[1::2], strict=True))
        self._end = self._end_of.pop(0, None)  # the mark that ends the pair that the text is in
        self._state = 0

    @property
    def depth(self) -> int:
        """Characters at the end of the text that may become a mark."""
        return self._marks.depth[self._state]

    def hides(self, character: str) -> bool:
        """Take one more character. Returns whether it is between marks, or ends one."""
        self._state = self._marks.step(self._state, ord(character))
        for state in self._marks.ending(self._state):
            if state == self._end:
                self._end = None
                return True
            if state in self._end_of:
                self._end = self._end_of[state]
                break
        return self._end is not None
