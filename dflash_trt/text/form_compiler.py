"""Compile the forms of structured outputs with llguidance, in a separate process: a form may take any time and memory.

sandbox_process.py imports this file by path. It imports nothing of this package.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any


def answer(
    tokenizer: str, vocab_size: int, end_tokens: list[int], kind: str, text: str, options: dict[str, Any],
    limit: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """`grammar`: llguidance's for a form, which was compiled within the limits, its first mask included. `seconds`: of
    CPU time that it took. `memory`: the bytes that it takes compiled. tokenizer: the path of a `tokenizer.json`.
    """
    try:
        known = _tokenizer(tokenizer, vocab_size, tuple(end_tokens))
        limit()
        before, begun = _memory(), time.process_time()
        grammar = llguidance_grammar(kind, text, options)
        matcher = compiled(known, grammar)
        if not matcher.is_error():
            matcher.compute_ff_tokens()
            matcher.compute_bitmask()
    except MemoryError:
        raise
    except BaseException as error:  # ValueError, or a panic of llguidance
        return {"error": str(error)[:1000] or type(error).__name__}
    if matcher.is_error():
        return {"error": matcher.get_error()[:500]}
    seconds = time.process_time() - begun
    return {"grammar": grammar, "seconds": seconds, "memory": max(0, _memory() - before)}


def _memory() -> int:
    """Bytes of memory that this process has in use; 0 where no /proc tells it."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is in use no more
    with suppress(OSError), open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE
    return 0


@lru_cache(maxsize=1)
def _tokenizer(path: str, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    with open(path, encoding="utf-8") as file:
        fields = json.load(file) | {"padding": None, "truncation": None}
    return guide_tokenizer(json.dumps(fields), vocab_size, list(end_tokens))


def guide_tokenizer(text: str, vocab_size: int, end_tokens: list[int]) -> Any:
    """llguidance's tokenizer from the text of a `tokenizer.json` without padding and truncation. Takes up to a second.
    Raises ValueError.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=end_tokens)


def llguidance_grammar(kind: Any, text: str, options: Any) -> str:
    """llguidance's grammar for a form: "json", "json_object" (with options), "regex", "choice" or "grammar". Raises
    ValueError.
    """
    from llguidance import LLMatcher, grammar_from

    if kind in ("json", "json_object"):
        return str(LLMatcher.grammar_from_json_schema(text, overrides=options))
    return str(grammar_from(kind, text))


def compiled(tokenizer: Any, grammar: str) -> Any:
    """An LLMatcher. Its errors are states.

    A mask of an ambiguous grammar ends with an error after 10,000 items of the parser, 0.04 s, instead of 0.5 s.
    """
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(step_max_items=10_000))
