"""Prompts that a target writes itself: after its template's opening of a user turn, it samples what users ask it.

A model that was trained on conversations completes such a turn with a request of the kind that it has seen (Magpie,
arXiv 2406.08464).
"""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_trt.decoding.params import SamplingParams
from dflash_trt.errors import RequestError
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.answers import GrowingFile
from dflash_trt.training.regenerate import plainly, together

CATEGORY = "own"
_TEMPERATURES = (0.7, 0.85, 1.0)
_TOP_P = 0.95  # the tail of a distribution gives broken requests
_MOST_TOKENS = 256
_BEGINNING = 60  # characters in which two prompts have to differ
_PLACE = "question7f3a"


def user_turn(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """The tokens up to what a user says in a new chat, and the token that ends the turn.

    Raises RequestError if the template does not show what a user says, or nothing ends it.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _PLACE}])
    opening, found, closing = text.partition(_PLACE)
    after = tokenizer.encode(closing, add_special_tokens=False) if closing.strip() else []
    if not found or not after:
        raise RequestError(
            f"{tokenizer.directory}: the chat template has no user turn that the target could complete: give prompts "
            "with --prompts"
        )
    return tokenizer.encode(opening, add_special_tokens=False), after[0]


class PromptFilter:
    """Which sampled texts are requests: finished ones of two characters or more, without the template's marks, whose
    beginning no earlier one has. dropped: the others, by reason.
    """

    def __init__(self, tokenizer: Tokenizer, kept: Sequence[str] = ()) -> None:
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._marks = [token.content for token in added if token.special]
        self._beginnings = set(map(_beginning, kept))
        self.dropped: Counter[str] = Counter()

    def takes(self, text: str, *, finished: bool) -> bool:
        reason = self._reason(text, finished)
        if reason is not None:
            self.dropped[reason] += 1
            return False
        self._beginnings.add(_beginning(text))
        return True

    def _reason(self, text: str, finished: bool) -> str | None:
        if not finished:
            return "unfinished"
        if len(text) < 2 or "\ufffd" in text or any(mark in text for mark in self._marks):
            return "broken"
        return "duplicate" if _beginning(text) in self._beginnings else None


def _beginning(text: str) -> str:
    return re.sub(r"\W+", " ", text.casefold()).strip()[:_BEGINNING]


def script(text: str) -> str:
    """The script of most letters of a text, by their Unicode names, such as LATIN or CJK; "" without letters."""
    letters = Counter(unicodedata.name(c, "").partition(" ")[0] for c in text if c.isalpha())
    return letters.most_common(1)[0][0] if letters else ""


def write_own_prompts(
    bundle: str | Path,
    out: Path,
    count: int,
    *,
    seed: int = 0,
    concurrency: int = 32,
    threads: int | None = None,
    stopped: Callable[[int], bool] = lambda written: False,
    report: Callable[[int, int], None] = lambda done, count: None,
) -> Counter[str]:
    """Add prompts of the target to the JSONL file `out` until it has `count`, `stopped` says so of their number, or
    nine of ten samples are no requests. Returns what was dropped, by reason.

    Sample i depends on seed and i alone, and a later call continues after the last one that was kept.
    """

    async def run(file: GrowingFile) -> Counter[str]:
        kept = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        numbers = [int(line["id"].partition("-")[2]) for line in kept]
        async with plainly(bundle, concurrency, threads=threads) as llm:
            opening, end = user_turn(llm.tokenizer)
            texts = PromptFilter(llm.tokenizer, [line["messages"][0]["content"] for line in kept])
            room = min(_MOST_TOKENS, llm.max_seq_len - len(opening) - 1)
            written, tried, number = len(kept), 0, max(numbers, default=-1)

            async def work() -> None:
                nonlocal written, tried, number
                while written < count and not stopped(written) and (tried < 100 or 10 * written > tried):
                    tried, number, mine = tried + 1, number + 1, number + 1
                    params = SamplingParams(
                        max_tokens=room,
                        temperature=_TEMPERATURES[mine % len(_TEMPERATURES)],
                        top_p=_TOP_P,
                        seed=(seed << 32) + mine,
                        stop_token_ids=[end],
                    )
                    done = await llm.generate(opening, params, speculate=False)
                    text = done.text.strip()
                    if written < count and texts.takes(text, finished=done.finish_reason == "stop"):
                        written += 1
                        message = {"role": "user", "content": text}
                        file.append({"id": f"own-{mine}", "category": CATEGORY, "messages": [message]})
                        report(written, count)

            await together(work, concurrency)
            return texts.dropped

    with GrowingFile(out) as file:
        return asyncio.run(run(file))
