"""Prompt files: the shipped ones, and any file of JSON lines with prompts or messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_trt.errors import RequestError, show
from dflash_trt.files.reading import parse_object, read_text
from dflash_trt.text.tokenizer import Tokenizer

SHIPPED_PROMPTS = Path(__file__).parent / "shipped" / "prompts"
MOST_BYTES = 256 << 20  # of a prompt file


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file. Messages go through the chat template with its `variables`, text does not."""

    id: str
    category: str
    content: str | list[dict[str, str]]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Its tokens for a model with this tokenizer. Raises RequestError."""
        if isinstance(self.content, str):
            return tokenizer.encode(self.content)
        text = tokenizer.apply_chat_template(self.content, **self.variables)
        return tokenizer.encode(text, add_special_tokens=False)


def read_prompts(file: Path | None, limit: int, variables: Mapping[str, Any] | None = None) -> list[Prompt]:
    """The prompts of a JSONL file, or the shipped ones. At most `limit` (0: all), taking the categories in turn.
    `variables` of the chat template take precedence over a line's own, `chat_template_kwargs`.

    Raises RequestError, naming the file and line of a malformed prompt.
    """
    files = sorted(SHIPPED_PROMPTS.glob("*.jsonl")) if file is None else [file]
    prompts = [prompt for place in files for prompt in _read_file(place, variables or {})]
    if not prompts:
        raise RequestError(
            f"{file or SHIPPED_PROMPTS}: no prompts; expected JSON lines with a prompt or messages field"
        )
    # Order by rank within the category: the first prompt of every category, then the second of every category.
    seen: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        ranked.append((seen.setdefault(prompt.category, 0), prompt))
        seen[prompt.category] += 1
    ranked.sort(key=lambda pair: pair[0])
    return [prompt for _, prompt in ranked][: limit or None]


def natural_prompts(file: Path | None, limit: int) -> list[Prompt]:
    """The first `limit` prompts of a file, taking the categories in turn (0: all). By default the shipped natural
    prompts.
    """
    if file is not None:
        return read_prompts(file, limit)
    several = [
        read_prompts(language, 0) for language in sorted((SHIPPED_PROMPTS / "natural").glob("*.jsonl"))
    ]
    return [prompt for row in zip(*several, strict=True) for prompt in row][: limit or None]


def _read_file(file: Path, variables: Mapping[str, Any]) -> Iterator[Prompt]:
    for number, line in enumerate(read_text(file, MOST_BYTES, RequestError).split("\n"), start=1):
        if not line.strip():
            continue
        fields = parse_object(line, f"{file}:{number}", RequestError)
        content = fields.get("messages", fields.get("prompt"))
        if not isinstance(content, (str, list)) or not content:
            raise RequestError(
                f'{file}:{number}: expected {{"prompt": "..."}} or {{"messages": [...]}}, found {show(fields)}'
            )
        of_prompt = fields.get("chat_template_kwargs", {})
        if not isinstance(of_prompt, dict):
            raise RequestError(
                f"{file}:{number}: chat_template_kwargs is {show(of_prompt)}, expected an object"
            )
        name, category = str(fields.get("id", f"{file.stem}:{number}")), str(fields.get("category", ""))
        yield Prompt(name, category, content, {**of_prompt, **variables})
