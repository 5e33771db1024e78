"""The form that a request's text must have: a mask over the tokens, and drafts that fit it.

llguidance (https://github.com/guidance-ai/llguidance) compiles the form and says which tokens may come next.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from dflash_trt.errors import INTERRUPTIONS, BusyError, RequestError, quoted
from dflash_trt.extras import install
from dflash_trt.text.form_compiler import compiled, guide_tokenizer, llguidance_grammar
from dflash_trt.text.sandbox import LimitError, Sandbox

if TYPE_CHECKING:
    from dflash_trt.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
MOST_CHARACTERS = 1 << 16
MOST_CHOICES = 1024
# What a form may take to compile. Schemas of 1,024 properties take 0.1 s and little stack. Threads have 8 MiB of stack,
# and llguidance has no limit for the depth of references.
SANDBOX = Sandbox("form_compiler", processes=2, seconds=1, memory=128 << 20, stack=1 << 20)
MOST_MEMORY = 1 << 30  # bytes of the compiled forms that a server has at a time
CHEAP_SECONDS = 0.1  # others may wait as long for the thread that compiles a form
_PROVEN = 64  # forms that were found to compile within these limits
# The CPU time that a request's form may take. A token of usual forms takes up to 0.01 s, but ambiguous grammars take
# longer with each.
SPARE_SECONDS, TOKEN_SECONDS = 0.25, 0.02
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

    They have at most 65,536 characters, and `choice` at most 1024 strings. A form is refused that takes more than a
    second of CPU time, or 128 MiB of memory, to compile, and a request ends with an error whose form takes more than
    0.25 s and 0.02 s per token. The model's end token ends the text as soon as, and only when, it has the form. A text
    that reaches `max_tokens` before may be incomplete.
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
        forms = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        forms += ["json_object"] if self.json_object else []
        if len(forms) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(forms) or 'no field'}, expected one of json, "
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
            raise RequestError(f"{forms[0]} has {self.size} characters, expected at most {MOST_CHARACTERS}")

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
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise RequestError(f"choice is {quoted(choices)}, expected a list of strings")
    if len(choices) > MOST_CHOICES:
        raise RequestError(f"choice has {len(choices)} strings, expected at most {MOST_CHOICES}")
    if wrong := [choice for choice in choices if not isinstance(choice, str) or not choice]:
        raise RequestError(f"choice contains {quoted(wrong[0])}, expected non-empty strings")
    return tuple(choices)


class Structures:
    """Compiles the forms of requests for one tokenizer. Thread-safe.

    The time and memory that a form takes cannot be told beforehand, and nothing stops llguidance. So a form is compiled
    in the sandbox first, unless that is known to be cheap, and here if it has stayed within the limits.

    end_tokens: the model's end tokens. most_memory: bytes that compiled forms may take together.
    """

    most_memory = inf

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._lock = threading.Lock()
        self._known: Any = None  # llguidance's tokenizer; it is made with the first form, in up to a second
        # By the salt of a request and its form, which compiles within the limits: llguidance's grammar, and the seconds
        # and bytes that it takes.
        self._proven: dict[tuple[str, StructuredOutputs], tuple[str, float, int]] = {}
        self._living = WeakSet[Structure]()

    def is_cheap(self, form: StructuredOutputs, salt: str) -> bool:
        """Whether it is known that a form compiles in a tenth of a second."""
        if form.choice is not None or form.json_object:  # their length bounds it
            return True
        return self._proven.get((salt, form), ("", inf, 0))[1] < CHEAP_SECONDS

    def compile(self, form: StructuredOutputs, salt: str = "") -> Structure:
        """A form at its beginning. Only requests of its salt spare it the sandbox, whose time would tell what others
        ask for. Raises RequestError if it cannot be compiled, or not within the limits; BusyError if the forms of other
        requests leave no memory.
        """
        if not self._end_tokens:
            raise RequestError(
                "structured_outputs needs a target with an end token, and this bundle's has none"
            )
        if find_spec("llguidance") is None:
            raise RequestError(
                f"structured_outputs needs the package llguidance: {install('serve:llguidance')}"
            )
        with self._lock:
            if self._known is None:
                self._known = self._read_tokenizer()
        kind, text, options = _source(form)
        if form.choice is not None or form.json_object:
            grammar, memory = llguidance_grammar(kind, text, options), 0
        else:
            grammar, _, memory = self._prove(form, salt)
        with self._lock:
            taken = sum(living.memory for living in self._living)
        if taken and taken + memory > self.most_memory:
            raise BusyError(
                f"structured_outputs: the forms of requests in flight take {taken >> 20} MiB; try again later"
            )
        matcher = compiled(self._known, grammar)
        if matcher.is_error():
            raise RequestError(f"{kind} cannot be compiled: {matcher.get_error()[:500]}")
        structure = Structure(matcher, self._vocab_size, self._end_tokens, memory)
        with self._lock:
            self._living.add(structure)
        return structure

    def _prove(self, form: StructuredOutputs, salt: str) -> tuple[str, float, int]:
        """llguidance's grammar for a form that compiles within the limits, and what it takes. Raises RequestError."""
        if (known := self._proven.get((salt, form))) is not None:
            return known
        kind, text, options = _source(form)
        task = {
            "tokenizer": str((self._tokenizer.directory / "tokenizer.json").resolve()), "vocab_size": self._vocab_size,
            "end_tokens": self._end_tokens, "kind": kind, "text": text, "options": options,
        }  # fmt: skip
        try:
            answer = SANDBOX.run(task)
        except LimitError as error:
            raise RequestError(f"{kind} is too complex: to compile it takes {error}") from None
        if "error" in answer:
            raise RequestError(f"{kind} cannot be compiled: {answer['error']}")
        known = answer["grammar"], answer["seconds"], answer["memory"]
        with self._lock:
            self._proven[salt, form] = known
            if len(self._proven) > _PROVEN:
                del self._proven[next(iter(self._proven))]
        return known

    def _read_tokenizer(self) -> Any:
        text = self._tokenizer.backend.to_str()  # without padding and truncation (text/tokenizer.py)
        try:
            return guide_tokenizer(text, self._vocab_size, self._end_tokens)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs: llguidance cannot read this bundle's tokenizer: {error}"
            ) from error


def _source(form: StructuredOutputs) -> tuple[str, str, dict[str, Any]]:
    """The field of a form, its text, and llguidance's options for JSON."""
    if form.choice is not None:
        return "choice", json.dumps(form.choice), {}
    for kind in ("regex", "grammar"):
        if (text := getattr(form, kind)) is not None:
            return kind, text, {}
    options = (
        {"whitespace_flexible": False} if form.disable_any_whitespace else {"whitespace_pattern": WHITESPACE}
    )
    if form.json_object:
        return "json_object", '{"type": "object"}', options
    return "json", str(form.json), options


class Structure:
    """The form of one request, and how far its text has come.

    llguidance tokenizes the whole text that the form forces, for every mask and every question. So it is asked once
    when such a text begins; its tokens are the only ones allowed until they have all come. Where it begins depends on
    the tokens before it alone, and so do the tokens that are allowed. memory: the bytes that its beginning takes.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_tokens: Collection[int], memory: int = 0) -> None:
        self.memory = memory
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, frozenset(end_tokens)
        self.ended = False  # whether the end token has come; later tokens do not count
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)
        self._forced: Sequence[int] = ()  # a forced text; `_come` of its tokens have come
        self._come = 0
        self._looks_ahead = True
        self._tokens, self._seconds = 0, 0.0  # so far, of CPU time
        self._begin_forced()

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next: [V]. All, once it has ended."""
        if self.ended:
            return np.ones(self._vocab_size, np.bool_)
        if self._come < len(self._forced):
            only = np.zeros(self._vocab_size, np.bool_)
            only[self._forced[self._come]] = True
            return only
        with self._limited():
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].view(np.bool_)

    def add(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if not self.ended:
            with self._limited():
                self._matcher.consume_token(token)
                self._tokens += 1
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
        begun = time.thread_time()
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
        self._seconds += time.thread_time() - begun
        return taken, forced

    def _begin_forced(self) -> None:
        with self._limited():
            self._forced, self._come = self._matcher.compute_ff_tokens(), 0

    def _ahead(self, matcher: Any) -> Sequence[int]:
        """What the form forces after drafts. A long text after drafts is not asked for again: they may be wrong, in
        every round.
        """
        if not self._looks_ahead:
            return ()
        forced: Sequence[int] = matcher.compute_ff_tokens()
        self._looks_ahead = len(forced) <= LONG_FORCED
        return forced

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """A step, which must not fail and counts towards the limit of time."""
        begun = time.thread_time()
        yield
        self._seconds += time.thread_time() - begun
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs: {self._matcher.get_error()[:500]}")
        if self._seconds > SPARE_SECONDS + TOKEN_SECONDS * self._tokens:
            raise RequestError(
                f"structured_outputs: the form is too complex: {self._tokens} tokens take {self._seconds:.2f} s of CPU "
                f"time, expected at most {SPARE_SECONDS} s and {TOKEN_SECONDS} s per token"
            )
