"""Text from arriving tokens. It is never taken back, and its sum equals the decoding of all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

_REPLACEMENT = "\ufffd"  # the decoding of bytes that are not (yet) a character
# A character has at most 4 bytes and a token at least one. Tokens further back no longer matter.
_REACH = 8
_MOST_PENDING = (
    32  # tokens after which the middle of the pending ones is dropped: more is slower, fewer is not faster
)
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
