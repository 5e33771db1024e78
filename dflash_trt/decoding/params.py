"""What a caller asks for, and what comes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np

from dflash_trt.decoding.statistics import Statistics
from dflash_trt.errors import RequestError, quoted

# "cancelled" and "timeout" come from outside, of requests that can be cancelled and have a deadline. "error" counts in
# the metrics the requests that ended by an error of their own; who asked gets that error.
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
MOST_WORDS = 1024  # of stop, bad_words and stop_token_ids
MOST_CHARACTERS = 8192  # of stop, and of bad_words: what looks for them takes 120 bytes of memory for each
_SMALLEST = 2.0**-126  # of float32; kernels may take what is smaller for 0


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded; the names and meanings are vLLM's. Raises RequestError naming the field.

    They apply in vLLM's order: penalties and bad words, temperature, min-p, top-k, top-p.

    max_tokens: tokens to generate at most, stop token included.
    temperature: 0 takes the most probable token; otherwise 0.01 to 100.
    top_k: keep the k most probable tokens; 0 keeps all.  top_p: keep the smallest set that holds this
    probability, at least the best token (numbers below 2**-126 count as that).
    min_p: keep tokens at least this fraction as probable as the most probable one.
    repetition_penalty: over prompt and output; presence_penalty, frequency_penalty: over the output.
    seed: 0 to 2**64 - 1; None draws one, reported in Completion.seed.
    stop: strings that end the text (not part of it).  stop_token_ids: as the model's own end tokens.
    ignore_eos: the model's own end tokens do not end the text; `stop` and `stop_token_ids` still do.
    bad_words: words that are not generated: their token sequences, with and without a space before them, are never
    completed. (The same letters may come out of other tokens.)
    `stop` and `bad_words` have at most 1024 strings and 8192 characters each, `stop_token_ids` at most 1024 ids.
    logprobs: report the natural logarithm of each token's probability under the target, before temperature, penalties
    and truncation.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("top_k", 0, 2**31 - 1)
        if self.seed is not None:
            self._integer("seed", 0, 2**64 - 1)
        self._number("temperature", 0.01, 100, "0 (greedy) or ", zero=True)
        self._number("top_p", 0, 1, "above ", open_low=True)
        object.__setattr__(self, "top_p", max(self.top_p, _SMALLEST))
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0.01, 100)
        self._number("presence_penalty", -100, 100)
        self._number("frequency_penalty", -100, 100)
        for field in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, field), bool):
                raise RequestError(f"{field} is {quoted(getattr(self, field))}, expected True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else self._items("stop")
        bad_words = self._items("bad_words")
        for field, words in (("stop", stop), ("bad_words", bad_words)):
            if wrong := [s for s in words if not isinstance(s, str) or not s]:
                raise RequestError(f"{field} contains {quoted(wrong[0])}, expected non-empty strings")
            if (size := sum(len(s) for s in words if isinstance(s, str))) > MOST_CHARACTERS:
                raise RequestError(f"{field} has {size} characters, expected at most {MOST_CHARACTERS}")
        ids = tuple(token_ids(self._items("stop_token_ids"), "stop_token_ids"))
        if ids and min(ids) < 0:
            raise RequestError(f"stop_token_ids contains {quoted(min(ids))}, expected token ids (0 or more)")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "bad_words", bad_words)

    @property
    def penalized(self) -> bool:
        """Whether the tokens so far change the logits, so that a TokenCounts has to be kept."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.bad_words)

    @property
    def greedy(self) -> bool:
        """Whether the plain argmax of the logits is the token: what the graph computes by itself."""
        return self.temperature == 0 and not self.penalized

    def _integer(self, field: str, low: int, high: int) -> None:
        value = getattr(self, field)
        number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else -1
        if not low <= number <= high:
            raise RequestError(f"{field} is {quoted(value)}, expected an integer, {low} to {high}")
        object.__setattr__(self, field, number)

    def _number(
        self,
        field: str,
        low: float,
        high: float,
        note: str = "",
        *,
        open_low: bool = False,
        zero: bool = False,
    ) -> None:
        value = getattr(self, field)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not (low <= value <= high or (zero and value == 0)) or (open_low and value == low):
            raise RequestError(f"{field} is {quoted(value)}, expected {note}{low} to {high}")
        object.__setattr__(self, field, float(value))

    def _items(self, field: str) -> tuple[object, ...]:
        value = getattr(self, field)
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence | np.ndarray):
            raise RequestError(f"{field} is {quoted(value)}, expected a list")
        if len(value) > MOST_WORDS:
            what = "ids" if field.endswith("_ids") else "strings"
            raise RequestError(f"{field} has {len(value)} {what}, expected at most {MOST_WORDS}")
        return tuple(value)


def token_ids(values: Collection[object], name: str) -> list[int]:
    """Token ids as Python's integers. Raises RequestError naming what is no integer: a float, a bool, a byte string."""
    kinds = {
        kind for kind in set(map(type, values)) if not issubclass(kind, Integral) or issubclass(kind, bool)
    }
    if kinds:
        wrong = next(value for value in values if type(value) in kinds)
        raise RequestError(
            f"{name} contains {quoted(wrong)}, a {type(wrong).__name__}, expected token ids: integers"
        )
    return [int(value) for value in values]  # type: ignore[call-overload]


@dataclass(frozen=True)
class Completion:
    """One finished request. `token_ids` has the stop token, `text` has not and ends before a stop string; `logprobs`,
    if asked for, has one number per token.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    statistics: Statistics
    seed: int
    prompt_token_ids: list[int]
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Chunk:
    """One run of tokens of a stream. `text` may lag behind the tokens; the first chunk has the prompt's token ids, the
    last one the statistics.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    statistics: Statistics | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None
