"""Text as tokens arrive: never taken back, and together exactly what decoding all the tokens at once
gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

_REPLACEMENT = "\ufffd"  # what bytes that are not (yet) a character decode to


class Detokenizer:
    """The text of one request, piece by piece, special tokens left out.

    `push(a) + push(b) + ... + flush()` equals `decode(a + b + ...)` for every byte-level tokenizer and any
    tokens. With byte-fallback tokenizers that holds for well-formed text; there a wrong byte turns the
    characters directly before it, already emitted, into replacement characters in a decode of the whole.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoding a token can depend on those before it (bytes of one character; a space at the start of a
        # text). The window begins with whole characters that are already out, as context.
        self._window: list[int] = []
        self._text = ""
        self._shown = 0  # characters of self._text that are out
        self._context_end = 0  # tokens of the window whose text was out, complete, at the last cut

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain; "" while a character is incomplete."""
        self._window.extend(tokens)
        text = self._tokenizer.decode(self._window)
        end = len(text.rstrip(_REPLACEMENT))
        piece = text[self._shown : end]
        self._text, self._shown = text, max(self._shown, end)
        if piece and end == len(text):
            window = self._window[self._context_end :]
            if context := self._tokenizer.decode(window):
                self._window, self._context_end = window, len(window)
                self._text, self._shown = context, len(context)
        return piece

    def flush(self) -> str:
        """The rest, at the end: bytes of an incomplete character become U+FFFD."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece
