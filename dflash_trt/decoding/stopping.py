"""When a request ends, and which text may be shown before it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dflash_trt.decoding.request import FinishReason, SamplingParams
from dflash_trt.decoding.text import Detokenizer


class Emission(NamedTuple):
    """What one run of tokens gave: the first `kept` of them count, `text` may be shown now."""

    kept: int
    text: str
    finish_reason: FinishReason | None


class StopChecker:
    """Stop tokens, stop strings and the token budget of one request. How the tokens are cut into runs is not
    seen.

    As in vLLM, a stop token is kept but has no text; the token that completes a stop string is kept, and the
    text ends before the string. Of several stop strings the one complete first ends the text, the longest if
    two end together. A stop wins over `max_tokens` when one token reaches both.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Iterable[int], detokenizer: Detokenizer
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._stop_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self._stops = tuple(params.stop)
        self.remaining = params.max_tokens  # tokens that may still be kept
        self._detokenizer = detokenizer
        self._held = ""  # decoded, but possibly the beginning of a stop string

    def push(self, tokens: Sequence[int]) -> Emission:
        """Take the next run of tokens. After the end nothing is kept."""
        if self.finish_reason:
            return Emission(0, "", self.finish_reason)
        kept = min(len(tokens), self.remaining)
        reason: FinishReason | None = "length" if kept == self.remaining else None
        spoken = tokens[:kept]
        if not self._stop_ids.isdisjoint(spoken):
            first = next(i for i, token in enumerate(spoken) if token in self._stop_ids)
            kept, reason, spoken = first + 1, "stop", tokens[:first]
        if not self._stops:
            text = self._detokenizer.push(spoken)
            if reason:
                text += self._detokenizer.flush()
        else:
            text, matched = self._match(spoken, last=reason is not None)
            if matched is not None:
                kept, reason = matched or kept, "stop"
        self.remaining -= kept
        self.finish_reason = reason
        return Emission(kept, text, reason)

    def abandon(self, reason: FinishReason) -> str:
        """End from outside; returns the text that was held back."""
        if self.finish_reason:
            return ""
        self.finish_reason = reason
        return self._held + self._detokenizer.flush()

    def _match(self, tokens: Sequence[int], last: bool) -> tuple[str, int | None]:
        """The text to show, and after how many tokens a stop string was complete; 0: only by the flush at the
        end.
        """
        for count, token in enumerate(tokens, 1):
            self._held += self._detokenizer.push((token,))
            if (start := self._find()) is not None:
                return self._held[:start], count
        if last:
            self._held += self._detokenizer.flush()
            start = self._find()
            return self._held[:start], None if start is None else 0
        safe = len(self._held) - self._overlap()
        text, self._held = self._held[:safe], self._held[safe:]
        return text, None

    def _find(self) -> int | None:
        """Where the stop string that is complete first begins in the held text."""
        places = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(places)[1] if places else None

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        ends = range(longest, 0, -1)
        return next((n for n in ends if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
