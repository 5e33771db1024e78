"""The form that a request's text must have: a mask over the tokens, and drafts that fit it.

llguidance (https://github.com/guidance-ai/llguidance) compiles the form and says which tokens may come next.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.errors import INTERRUPTIONS, RequestError, quoted
from dflash_trt.extras import install

if TYPE_CHECKING:
    import tokenizers

_log = logging.getLogger(__name__)
MOST_CHARACTERS = 1 << 16
MOST_CHOICES = 1024
# llguidance's time grows with the square of these numbers, to half a second at most: the optional parts of a regex or
# grammar, and the properties of an object in a JSON schema.
MOST_OPTIONAL = 4096
MOST_PROPERTIES = 1024
_OPTIONAL = re.compile(r"[?*]|\{0?,|\|\)|\(\|")
# Tokens of a forced text from which on it is long: these take about a millisecond.
LONG_FORCED = 512
# JSON may have one space, or a line break with an indentation, wherever it allows whitespace. A model that is free to
# write whitespace for ever sometimes does.
WHITESPACE = r"( |\n[ \t]{0,32})?"


@dataclass(frozen=True)
class StructuredOutputs:
    """The form of a whole text, with vLLM's names: exactly one of these. Raises RequestError naming the field.

    json: a JSON schema, as an object or as its text.
    json_object: any JSON object.
    regex: a regular expression (Rust's syntax).
    choice: one of these strings.
    grammar: a context-free grammar, in Lark's syntax or in GBNF.

    disable_any_whitespace: JSON without spaces and line breaks. More of its tokens are forced then, so it is faster.

    They have at most 65,536 characters, `choice` at most 1024 strings, an object of `json` at most 1024 properties, and
    `regex` and `grammar` at most 4,096 optional parts. The model's end token ends the text as soon as, and only when,
    it has the form. A text that reaches `max_tokens` before may be incomplete.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {quoted(getattr(self, name))}, expected True or False")
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'no field'}, expected one of json, "
                "json_object, regex, choice and grammar"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("json", "regex", "grammar"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text):
                raise RequestError(f"{name} is {quoted(text)}, expected a non-empty text")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.size > MOST_CHARACTERS:
            raise RequestError(f"{given[0]} has {self.size} characters, expected at most {MOST_CHARACTERS}")
        optional = len(_OPTIONAL.findall(self.regex or self.grammar or ""))
        if optional > MOST_OPTIONAL:
            raise RequestError(
                f"{given[0]} has {optional} optional parts (?, * and others), expected at most {MOST_OPTIONAL}"
            )

    @property
    def size(self) -> int:
        """Characters."""
        texts = (self.json, self.regex, self.grammar, *(self.choice or ()))
        return sum(len(text) for text in texts if isinstance(text, str))


def _schema(schema: object) -> str:
    text = schema
    if not isinstance(schema, str):
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"json is not a JSON schema: {error}") from error
    assert isinstance(text, str)
    if len(text) > MOST_CHARACTERS:  # before it is parsed
        raise RequestError(f"json has {len(text)} characters, expected at most {MOST_CHARACTERS}")
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"json is {quoted(schema)}, expected a JSON schema: {error}") from error
    if read is True:
        return "{}"
    if not isinstance(read, dict):
        raise RequestError(f"json is {quoted(schema)}, expected a JSON schema: an object, or true")
    if (properties := _most_properties(read)) > MOST_PROPERTIES:
        raise RequestError(
            f"json has an object of {properties} properties, expected at most {MOST_PROPERTIES}"
        )
    return text


def _most_properties(schema: object) -> int:
    """The largest number of properties that an object of the schema has."""
    parts, most = [schema], 0
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if isinstance(part.get("properties"), dict):
                most = max(most, len(part["properties"]))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return most


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"choice is {quoted(choices)}, expected a list of strings")
    if len(choices) > MOST_CHOICES:
        raise RequestError(f"choice has {len(choices)} strings, expected at most {MOST_CHOICES}")
    if wrong := [each for each in choices if not isinstance(each, str) or not each]:
        raise RequestError(f"choice contains {quoted(wrong[0])}, expected non-empty strings")
    return tuple(choices)


class Structures:
    """Compiles the forms of requests for one tokenizer. Thread-safe.

    end_tokens: the model's end tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._lock = threading.Lock()
        self._known: Any = None  # llguidance's tokenizer; it is made with the first form, in up to a second

    def compile(self, form: StructuredOutputs) -> Structure:
        """A form at its beginning. Raises RequestError if it cannot be compiled."""
        if not self._end_tokens:
            raise RequestError(
                "structured_outputs needs a target with an end token, and this bundle's has none"
            )
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise RequestError(
                f"structured_outputs needs the package llguidance: {install('serve:llguidance')}"
            ) from None
        try:
            name, grammar = _grammar(LLMatcher, form)
        except ValueError as error:
            raise RequestError(f"structured_outputs: {error}") from error
        with self._lock:
            if self._known is None:
                self._known = self._read_tokenizer()
        matcher = LLMatcher(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{name} cannot be compiled: {matcher.get_error()[:500]}")
        return Structure(matcher, self._vocab_size, self._end_tokens)

    def _read_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        text = self._tokenizer.to_str()  # without padding and truncation (text/tokenizer.py)
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._end_tokens)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs: llguidance cannot read this bundle's tokenizer: {error}"
            ) from error


def _grammar(matcher: Any, form: StructuredOutputs) -> tuple[str, str]:
    """The field of a form, and llguidance's grammar for it."""
    if form.json is not None or form.json_object:
        name, schema = ("json", form.json) if form.json is not None else ("json_object", '{"type": "object"}')
        spaces: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
        if form.disable_any_whitespace:
            spaces = {"whitespace_flexible": False}
        return name, matcher.grammar_from_json_schema(schema, overrides=spaces)
    if form.regex is not None:
        return "regex", matcher.grammar_from_regex(form.regex)
    from llguidance import grammar_from

    if form.choice is not None:
        return "choice", grammar_from("choice", json.dumps(form.choice))
    assert form.grammar is not None
    return "grammar", grammar_from("grammar", form.grammar)


class Structure:
    """The form of one request, and how far its text has come.

    llguidance tokenizes the whole text that the form forces, for every mask and every question. So it is asked once
    when such a text begins; its tokens are the only ones allowed until they have all come. Where it begins depends on
    the tokens before it alone, and so do the tokens that are allowed.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, frozenset(end_tokens)
        self.ended = False  # whether the end token has come; later tokens do not count
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)
        self._forced: Sequence[int] = ()  # a forced text; `_come` of its tokens have come
        self._come = 0
        self._looks_ahead = True
        self._begin_forced()

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next: [V]. All, once it has ended."""
        if self.ended:
            return np.ones(self._vocab_size, np.bool_)
        if self._come < len(self._forced):
            only = np.zeros(self._vocab_size, np.bool_)
            only[self._forced[self._come]] = True
            return only
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def add(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if not self.ended:
            self._matcher.consume_token(token)
            self._check()
            self.ended = token in self._end_tokens
            self._come += 1
            if self._come >= len(self._forced) and not self.ended:
                self._begin_forced()

    def follow(self, drafts: Sequence[int], most: int) -> tuple[list[int], list[bool]]:
        """Up to `most` tokens that may come next one after another, and which of them the form forces.

        These are the drafts, up to the first one that the form refuses. Where the form leaves one text only, its tokens
        take the place of a refused draft and continue the drafts. Only a copy of the matcher sees them, as llguidance
        takes back no error: an error of theirs, whatever it is, ends the drafts and nothing else.
        """
        if self.ended:
            return [], []
        taken = list(self._forced[self._come : self._come + most])
        forced = [token not in drafts[i : i + 1] for i, token in enumerate(taken)]
        if len(taken) == most:
            return taken, forced
        try:
            matcher = self._matcher.deep_copy()
            follows = matcher.consume_tokens(taken)
            while follows and len(taken) < most and not (taken and taken[-1] in self._end_tokens):
                rest = list(drafts[len(taken) : most])
                fitting = rest[: matcher.validate_tokens(rest)]
                part = fitting or self._ahead(matcher)[: most - len(taken)]
                if follows := bool(part) and matcher.consume_tokens(part):
                    taken += part
                    forced += [not fitting] * len(part)
        except INTERRUPTIONS:
            raise
        except BaseException as error:
            _log.debug("drafts of a structured request end with an error of llguidance: %s", error)
        return taken, forced

    def _begin_forced(self) -> None:
        self._forced, self._come = self._matcher.compute_ff_tokens(), 0
        self._check()

    def _ahead(self, matcher: Any) -> Sequence[int]:
        """What the form forces after drafts. A long text after drafts is not asked for again: they may be wrong, in
        every round.
        """
        if not self._looks_ahead:
            return ()
        forced: Sequence[int] = matcher.compute_ff_tokens()
        self._looks_ahead = len(forced) <= LONG_FORCED
        return forced

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs: {self._matcher.get_error()[:500]}")
