"""Prompts that a run measures its drafter with, and does not train on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dflash_trt.errors import RequestError
from dflash_trt.files.disk import whole_file
from dflash_trt.prompts import Prompt, read_prompts
from dflash_trt.training.answers import Answer, Content, content_field, number

_SHARE = 10  # one prompt of so many is held out


def hold_out(answers: Sequence[Answer], file: Path | None, data: Path) -> tuple[list[Answer], list[Prompt]]:
    """The answers to train on, and the prompts to measure with. No answer to one of these is among those.

    The prompts are those of `file`; without it, a tenth of the answered ones. A hash of its text chooses a prompt. So
    neither the order nor later answers change its side, and a prompt that occurs twice is on one side.

    Raises RequestError if an answer does not have its prompt, or if no prompt is held out.
    """
    if file is not None:
        prompts = read_prompts(file, 0)
        asked = {_text(prompt.content) for prompt in prompts}
        return [a for a in answers if a.content is None or _text(a.content) not in asked], prompts
    held: dict[str, Prompt] = {}
    rest = []
    for answer in answers:
        if answer.content is None:
            raise RequestError(
                f"{data}: answer {answer.id} has neither messages nor prompt, so no prompt can be held out to measure "
                "with: give other prompts with --held-out"
            )
        text = _text(answer.content)
        if number(text, "held out") % _SHARE:
            rest.append(answer)
        else:
            held.setdefault(text, Prompt(answer.id, answer.category, answer.content))
    if not held:
        raise RequestError(
            f"{data}: has {len(answers)} answers, too few to hold out a tenth of their prompts: regenerate more, or "
            "give other prompts with --held-out"
        )
    return rest, list(held.values())


def write_prompts(file: Path, prompts: Sequence[Prompt]) -> None:
    """Write a prompt file."""
    with whole_file(file) as to:
        for prompt in prompts:
            line = {"id": prompt.id, "category": prompt.category, **content_field(prompt.content)}
            to.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def digest(prompts: Sequence[Prompt]) -> str:
    """Identifies prompts by their texts."""
    return hashlib.sha256("\n".join(_text(prompt.content) for prompt in prompts).encode()).hexdigest()[:16]


def _text(content: Content) -> str:
    return json.dumps(content, sort_keys=True)
