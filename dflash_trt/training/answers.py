"""The target's own answers, on which a drafter is trained. A finished answer is appended as one JSON line.

A line has the prompt's `id`, `category`, `messages` or `prompt`, and `chat_template_kwargs`, as a prompt file has them;
then `prompt_ids` (the rendered chat), `answer_ids`, `temperature` and `finish_reason`. A complete answer ends with its
end token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from dflash_trt.errors import RequestError
from dflash_trt.files.disk import whole_file
from dflash_trt.files.reading import parse_object
from dflash_trt.prompts import Prompt, read_prompts

_SHARE = 10  # one prompt of so many is held out
Content = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and its prompt. content: messages or text of the prompt; None if the file does not have them."""

    id: str
    category: str
    prompt_ids: list[int]
    answer_ids: list[int]
    temperature: float
    finish_reason: str
    content: Content | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids


def _prompt_fields(of: Answer | Prompt) -> dict[str, Any]:
    """A prompt's content and variables of the chat template, as a line of a prompt file has them."""
    fields: dict[str, Any] = {"chat_template_kwargs": dict(of.variables)} if of.variables else {}
    if of.content is not None:
        fields["prompt" if isinstance(of.content, str) else "messages"] = of.content
    return fields


class GrowingFile:
    """A file of JSON lines that grows, as a context manager. Opening it drops a last line that a kill cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def append(self, fields: Mapping[str, Any]) -> None:
        """Raises OSError, which names the file. Then it has nothing of this line."""
        line = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            while line:  # a disk that is nearly full takes a part
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(size)
            error.filename = str(self.path)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class AnswerFile(GrowingFile):
    """A file of answers that grows. done: the ids of those that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.done = {answer.id for answer in read_answers(path)}

    def add(self, answer: Answer) -> None:
        fields = asdict(answer)
        del fields["content"], fields["variables"]
        self.append(fields | _prompt_fields(answer))
        self.done.add(answer.id)


def read_answers(path: Path) -> list[Answer]:
    """The answers of a file, in its order. An incomplete last line is still being written and is left out.

    Raises RequestError, naming the file and line of a malformed answer.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path}: cannot be read as a file of answers ({getattr(error, 'strerror', error)})"
        ) from error
    return [_answer(path, number, line) for number, line in enumerate(lines[:-1], start=1) if line.strip()]


def _answer(path: Path, number: int, line: str) -> Answer:
    fields = parse_object(line, f"{path}:{number}", RequestError)
    for key in ("prompt_ids", "answer_ids"):
        ids = fields.get(key)
        if not (isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)):
            raise RequestError(
                f"{path}:{number}: {key} is not a list of token ids; make it with: train regenerate"
            )
    return Answer(
        id=str(fields.get("id", number)),
        category=str(fields.get("category", "")),
        prompt_ids=fields["prompt_ids"],
        answer_ids=fields["answer_ids"],
        temperature=float(fields.get("temperature", 0.0)),
        finish_reason=str(fields.get("finish_reason", "")),
        content=fields.get("messages", fields.get("prompt")),
        variables=fields.get("chat_template_kwargs", {}),
    )


def hashed(text: str, purpose: str) -> int:
    """A number of 64 bits from an id or a text, a different one for each purpose."""
    digest = hashlib.sha256(f"{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts of answers: in total, by category, and of complete ones."""
    return {
        "answers": len(answers),
        "answer_tokens": sum(len(answer.answer_ids) for answer in answers),
        "prompt_tokens": sum(len(answer.prompt_ids) for answer in answers),
        "ended": sum(answer.finish_reason == "stop" for answer in answers),
        "categories": dict(sorted(Counter(answer.category for answer in answers).items())),
    }


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
        if hashed(text, "held out") % _SHARE:
            rest.append(answer)
        else:
            held.setdefault(text, Prompt(answer.id, answer.category, answer.content, answer.variables))
    if not held:
        raise RequestError(
            f"{data}: has {len(answers)} answers, too few to hold out a tenth of their prompts: regenerate more, or "
            "give other prompts with --held-out"
        )
    return rest, list(held.values())


def write_prompts(file: Path, prompts: Sequence[Prompt]) -> None:
    with whole_file(file) as to:
        for prompt in prompts:
            line = {"id": prompt.id, "category": prompt.category, **_prompt_fields(prompt)}
            to.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def digest(prompts: Sequence[Prompt]) -> str:
    """Identifies prompts by their texts."""
    return hashlib.sha256("\n".join(_text(prompt.content) for prompt in prompts).encode()).hexdigest()[:16]


def _text(content: Content) -> str:
    return json.dumps(content, sort_keys=True)
