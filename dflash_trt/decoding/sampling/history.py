"""The adjusted logits of a request, before its temperature: bias, words, penalties, by its tokens so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dflash_trt.decoding.output import Automaton
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.sampling.structure import Structure

Floats = NDArray[np.float32]
Tokens = NDArray[np.int64]


class History:
    """The tokens of one request so far, as far as its parameters ask for them.

    A row of logits is adjusted after all tokens before it were added. So the result depends on the request's own
    tokens alone, and is the same with and without drafts.

    prompt: its token ids, for the repetition penalty.
    bad_words: non-empty token sequences that are never completed. Only generated tokens count as their beginning.
    end_tokens: the tokens that end the request, for `min_tokens`.
    structure: the form of the text, at its beginning.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Iterable[int],
        bad_words: Sequence[Sequence[int]] = (),
        end_tokens: Collection[int] = (),
        structure: Structure | None = None,
    ) -> None:
        self._params, self.structure, self.allowed = params, structure, params.allowed_token_ids
        #: Excluded tokens: those before it, which complete a word with it, and the index in the answer from which on it
        #: is excluded no longer, if any.
        self.words: list[tuple[Sequence[int], int, int | None]] = [(w[:-1], w[-1], None) for w in bad_words]
        if params.min_tokens:
            self.words += [((), token, params.min_tokens) for token in sorted(end_tokens)]
        self._bias = (
            np.array(list(params.logit_bias), np.int64),
            np.array(list(params.logit_bias.values()), np.float32),
        )
        self._allowed = None if self.allowed is None else np.array(self.allowed, np.int64)
        self._limited = structure is not None or params.allowed_token_ids is not None
        self._end_tokens = np.array(sorted(end_tokens), np.int64)
        self._generated = 0
        seen = dict.fromkeys(prompt)
        self._slot = {token: slot for slot, token in enumerate(seen)}
        self._tokens = np.empty(max(64, 2 * len(seen)), dtype=np.int64)
        self._tokens[: len(seen)] = list(seen)
        self._output = np.zeros(self._tokens.size, dtype=np.float32)
        # The beginnings of bad words, and for each of them the tokens that would complete a bad word.
        self._beginnings = Automaton(word[:-1] for word in bad_words) if bad_words else None
        self._state = 0  # the longest beginning at the end of the generated tokens
        self._last: dict[int, Tokens] = {}
        if self._beginnings is not None:
            last: dict[int, set[int]] = {}
            for state, word in zip(self._beginnings.state_of, bad_words, strict=True):
                last.setdefault(state, set()).add(word[-1])
            self._last = {state: np.array(sorted(tokens)) for state, tokens in last.items()}

    @cached_property
    def leaves_some(self) -> bool:
        """Whether the tokens that may be excluded are never all that are allowed."""
        return self.allowed is None or not {token for _, token, _ in self.words}.issuperset(self.allowed)

    def add(self, token: int) -> None:
        """Count a generated token."""
        if self.structure is not None:
            self.structure.add(token)
        self._generated += 1
        slot = self._slot.setdefault(token, len(self._slot))
        if slot == self._tokens.size:
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
            self._output = np.concatenate((self._output, np.zeros_like(self._output)))
        self._tokens[slot] = token
        self._output[slot] += 1
        if self._beginnings is not None:
            self._state = self._beginnings.step(self._state, token)

    def adjust(self, logits: Floats) -> Floats:
        """An adjusted copy of `logits` [V].

        In vLLM's order: tokens that the structure refuses, those that are not allowed, bad words, and end tokens before
        `min_tokens` get -inf. Then the bias is added, then the penalties apply: repetition (Keskar et al. 2019),
        frequency and presence. What goes first counts most: none of these steps takes the last token that is left.
        """
        adjusted, params = logits.copy(), self._params
        if self.structure is not None:
            adjusted[~self.structure.allowed()] = -np.inf
        if self._allowed is not None and (kept := adjusted[self._allowed]).max() > -np.inf:
            adjusted.fill(-np.inf)
            adjusted[self._allowed] = kept
        if self._beginnings is not None:
            for beginning in self._beginnings.ending(self._state):
                self._exclude(adjusted, self._last[beginning])
        if self._generated < params.min_tokens:
            self._exclude(adjusted, self._end_tokens)
        if params.logit_bias:
            ids, bias = self._bias
            adjusted[ids] += bias
        if params.penalized:
            tokens, count = self._tokens[: len(self._slot)], self._output[: len(self._slot)]
            values = adjusted[tokens]
            factor = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / factor, values * factor)
            values -= np.float32(params.frequency_penalty) * count
            values -= np.float32(params.presence_penalty) * (count > 0)
            adjusted[tokens] = values
        return adjusted

    def _exclude(self, adjusted: Floats, tokens: Tokens) -> None:
        """Exclude tokens. They stay if a structure, or the allowed tokens, leave no others."""
        before = adjusted[tokens]
        adjusted[tokens] = -np.inf
        if self._limited and adjusted.max() == -np.inf:
            adjusted[tokens] = before
