"""Errors that this package raises on purpose. Each message is one line: the value, the place, the next step.

Names and values in a message may come from files and requests of strangers. `show` shortens a value. Every message
consists of printable characters, so it is safe in a terminal or a log.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence

_VALUE_CHARACTERS = 60
_NAME_CHARACTERS = 200
_MESSAGE_CHARACTERS = 4000

# These end the process or a generator. They are no error of a request, so they are raised and never turned into one.
INTERRUPTIONS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class DFlashError(Exception):
    """Base of all errors meant for the user. The command line prints them without a traceback."""

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(message, _MESSAGE_CHARACTERS))


class CheckpointError(DFlashError):
    """A checkpoint on disk is missing, malformed or of a kind that is not supported."""


class PairError(DFlashError):
    """A target and a drafter do not belong together. The message names both values that disagree."""


class BuildError(DFlashError):
    """The requested build is impossible."""


class BundleError(DFlashError):
    """A bundle is incomplete or altered, has another format version, or has graphs that disagree."""


class RequestError(DFlashError):
    """A request asks for something impossible. The message names the field."""

    @property
    def field(self) -> str | None:
        """The field that the message begins with; "prompt" where it begins with "the prompt"."""
        message = str(self)
        named = re.match(
            r"([a-z_]+)(?:\[\S*\])?(?: (?:is|has|contains|cannot be|needs) |(?<=_outputs): )", message
        )
        return named[1] if named else "prompt" if message.startswith("the prompt ") else None


class PromptLengthError(RequestError):
    """A text has more tokens than the model's context."""


class UsageError(BuildError, RequestError):
    """A value that was asked for is out of range, contradicts another one, or does not fit the bundle or checkpoint.

    The command line ends with status 2.
    """


class DecodingError(RequestError):
    """Decoding one request failed. No other request is affected. `__cause__` is the underlying error, if any."""


class NonFiniteError(DecodingError):
    """The target's logits for a token of this request have no finite largest value (NaN, or infinite)."""


class BatchError(DecodingError):
    """Some requests of a list failed. The others were completed.

    outcomes: one entry per request, in the order of the list: its Completion, or the RequestError that ended it.
    """

    def __init__(self, outcomes: Sequence[object]) -> None:
        failed = [(i, o) for i, o in enumerate(outcomes) if isinstance(o, RequestError)]
        first, error = failed[0]
        super().__init__(
            f"{len(failed)} of {len(outcomes)} requests failed, first the one at index {first}: {error} "
            "(the completions of the others are in this error's `outcomes`)"
        )
        self.outcomes = list(outcomes)


class EngineError(DFlashError):
    """A pass of an engine failed. Every request in flight ends with this error."""


class BusyError(RequestError):
    """Too many requests are waiting. The same request may be accepted later."""


def show(value: object) -> str:
    """A value as JSON, cut to a length that fits an error message. A value that JSON does not have becomes its type."""
    text = ""
    if isinstance(value, str):
        value = value[: _VALUE_CHARACTERS + 1]
    try:
        for part in _ENCODER.iterencode(value):  # in pieces: the whole may be large or deep
            text += part[: _VALUE_CHARACTERS + 1]
            if len(text) > _VALUE_CHARACTERS:
                return f"{text[: _VALUE_CHARACTERS - 3]}..."
    except (TypeError, ValueError):  # a key that is not a string, an integer with too many digits, a cycle
        return f"<{type(value).__name__}>"
    return text


def quoted(value: object) -> str:
    """A name, or a list of names, as Python writes it. A long one loses its middle."""
    try:
        return _REPR.repr(value)
    except ValueError:  # an integer with too many digits
        return f"<{type(value).__name__}>"


def did_you_mean(value: str, names: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """` (did you mean 'NAME'?)` with the nearest of `names`, or nothing where none is near. Case does not matter.

    `shown` maps a name to how it is written.
    """
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(value.lower()[:_NAME_CHARACTERS], lower, n=1, cutoff=0.6)
    return f" (did you mean {(shown or {}).get(lower[near[0]], lower[near[0]])!r}?)" if near else ""


def show_name(text: str) -> str:
    """A name from a file, without quotes. A long one loses its middle."""
    return shorten(text, _NAME_CHARACTERS)


def shorten(text: str, most: int) -> str:
    """One line of printable characters. Other characters are escaped, and a long text loses its middle."""
    if len(text) > most:
        text = f"{text[: most * 3 // 4]}...{text[-(most // 4) :]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _NAME_CHARACTERS
_REPR.maxlist = _REPR.maxtuple = 16
_ENCODER = json.JSONEncoder(default=lambda value: f"<{type(value).__name__}>")
