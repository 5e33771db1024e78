"""When a request ends, and which text may be shown before its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dflash_trt.decoding.output.automaton import Automaton
from dflash_trt.decoding.output.detokenizer import Detokenizer
from dflash_trt.decoding.params import FinishReason, SamplingParams


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
