"""Training text of the shipped pair `tiny`: four kinds of synthetic chat, and the interpreter's own library.

Every example is a pure function of (category, index): no file and no clock takes part, so the same call gives
the same text on every machine. Only `library_documents` depends on the running interpreter.

    math    word problems whose answers write every step out
    code    requests for short Python functions
    tools   function signatures in the system message, answered by JSON calls
    chat    questions about a closed world of invented towns

Held-out prompts are told from training ones by a hash of the prompt itself: no prompt can be on both sides. Those that
ship with the package (dflash_trt/shipped/prompts) come from an earlier and larger version of these programs.

    python -m build_scripts.corpus.corpus --count 5000 --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from build_scripts.corpus import arithmetic, chat, functions, tool_calls

GENERATORS = {
    "math": arithmetic.example, "code": functions.example, "tools": tool_calls.example, "chat": chat.example,
}  # fmt: skip
CATEGORIES = tuple(GENERATORS)
HELD_OUT_ONE_IN = 24
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant who answers in full sentences.",
)
TRAINING_SHARES = {"math": 0.36, "code": 0.32, "tools": 0.16, "chat": 0.16}
TRAINING_START = 500_000_000  # after the examples that the targets are trained on


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt (`messages`, each with `role` and `content`) and the assistant's answer."""

    category: str
    messages: tuple[dict[str, str], ...]
    answer: str

    @property
    def prompt(self) -> str:
        """The prompt as the chat template renders it, up to the start of the answer."""
        return render(self.messages) + "<|im_start|>assistant\n"

    @property
    def held_out(self) -> bool:
        """Whether nothing is trained on this prompt."""
        asked = json.dumps([message["content"] for message in self.messages if message["role"] != "system"])
        return int.from_bytes(hashlib.sha256(asked.encode()).digest()[:4], "big") % HELD_OUT_ONE_IN == 0


def render(messages: tuple[dict[str, str], ...]) -> str:
    """How the chat template of `tiny` renders messages without tools."""
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def example(category: str, index: int) -> Example:
    """Example number `index` of a category. Two indexes may give equal examples."""
    rng = random.Random(f"dflash-trt/{category}/{index}")
    messages, answer = GENERATORS[category](rng)
    if messages[0]["role"] != "system" and rng.random() < 0.25:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return Example(category, tuple(messages), answer)


def training_examples(category: str, start: int = 0) -> Iterator[Example]:
    """Endless examples that are not held out, from number `start` on."""
    return (drawn for index in count(start) if not (drawn := example(category, index)).held_out)


def library_documents() -> list[str]:
    """Source files of the running interpreter's standard library, in a fixed order, without tests."""
    root = Path(os.__file__).parent
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if not skip & set(path.relative_to(root).parts)]
    paths.sort(key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    documents: list[str] = []
    size = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 500 < len(text) < 120_000 and size < 6_000_000:
            documents.append(text)
            size += len(text)
    return documents


def main() -> None:
    """Write training prompts, for `dflash-trt train regenerate`."""
    parser = argparse.ArgumentParser(description="Write training prompts for the drafter of a toy pair.")
    parser.add_argument("--count", type=int, default=5000, help="training prompts")
    parser.add_argument("--out", type=Path, required=True, help="a JSONL file")
    arguments = parser.parse_args()
    lines = []
    for category, share in TRAINING_SHARES.items():
        examples = islice(training_examples(category, TRAINING_START), round(arguments.count * share))
        for number, item in enumerate(examples):
            record = {"id": f"{category}-{number}", "category": category, "messages": item.messages}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    arguments.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
