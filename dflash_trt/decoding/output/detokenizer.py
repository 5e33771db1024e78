"""Text as tokens arrive: never taken back, and together exactly what decoding all the tokens at once
gives.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

_REPLACEMENT = "\ufffd"  # what bytes that are not (yet) a character decode to
# A character has at most 4 bytes and a token at least one: so many tokens back, decoding no longer matters.
_REACH = 8
_MOST_PENDING = (
    32  # tokens after which the middle of what is pending is dropped: more is slower, fewer no faster
)
_HELD = 3  # replacement characters at the end that the next token may turn into one character


class Detokenizer:
    """The text of one request, piece by piece, special tokens left out.

    `push(a) + push(b) + ... + flush()` equals `decode(a + b + ...)` for every byte-level tokenizer and any
    tokens. With byte-fallback tokenizers that holds for well-formed text; there a wrong byte turns the
    characters directly before it, already emitted, into replacement characters in a decode of the whole.
    The time of a push does not depend on the tokens before it.
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
        window = [*self._window, *tokens]
        text = self._tokenizer.decode(window)
        if text.endswith(_REPLACEMENT) and len(tokens) > 1:  # how far are its characters whole?
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
        """The rest, at the end: bytes of an incomplete character become U+FFFD."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece

    def _cut(self) -> None:
        """The text is out, every character whole: what came since the last cut is context enough."""
        window = self._window[self._context_end :]
        if context := self._tokenizer.decode(window):
            self._window, self._context_end = window, len(window)
            self._text, self._shown = context, len(context)

    def _shorten(self) -> None:
        """Of tokens that have made no whole text for long, keep the first ones, which say whether a text has
        begun, and the last ones, whose bytes may become a character.
        """
        begun = self._context_end
        pending = [token for token in self._window[begun:] if not self._is_silent(token)]
        if len(pending) > 2 * _REACH:
            pending = [*pending[:_REACH], *pending[-_REACH:]]
        window = [*self._window[:begun], *pending]
        text, rest = self._tokenizer.decode(window), self._text[self._shown :]
        if text.endswith(rest):
            self._window, self._text, self._shown = window, text, len(text) - len(rest)

    def _is_silent(self, token: int) -> bool:
        """Whether decoding skips this token: it is a special one, or none."""
        decode = self._tokenizer.decode
        return not decode((token,)) and bool(
            self._tokenizer.id_to_token(token) is None or decode((token,), skip_special_tokens=False)
        )
