"""Training text of the shipped pair `tiny`: four kinds of synthetic chat, and the interpreter's own library.

Every example is a pure function of (category, index): no file and no clock takes part, so the same call gives
the same text on every machine. Only `library_documents` depends on the running interpreter.

    math    word problems whose answers write every step out
    code    requests for short Python functions
    tools   function signatures in the system message, answered by JSON calls
    chat    questions about a closed world of invented towns

Held-out prompts are told from training ones by a hash of the prompt itself: no prompt can be on both sides.
`python -m build_scripts.corpus.corpus` writes the held-out prompts that ship with the package, with `--out FILE`
training prompts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from build_scripts.corpus import arithmetic as corpus_math
from build_scripts.corpus import chat as corpus_chat
from build_scripts.corpus import functions as corpus_code
from build_scripts.corpus import tool_calls as corpus_tools

CATEGORIES = ("math", "code", "tools", "chat")
GENERATORS = {
    "math": corpus_math.example,
    "code": corpus_code.example,
    "tools": corpus_tools.example,
    "chat": corpus_chat.example,
}
HELD_OUT_ONE_IN = 24
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant who answers in full sentences.",
)
TRAINING_SHARES = {"math": 0.36, "code": 0.32, "tools": 0.16, "chat": 0.16}
TRAINING_START = 500_000_000  # after the examples that the targets are trained on
SHIPPED_PROMPTS = Path(__file__).parents[2] / "dflash_trt" / "shipped" / "prompts"


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


def examples(category: str, *, held_out: bool, start: int = 0) -> Iterator[Example]:
    """Endless examples of one side of the split. Held-out examples do not repeat."""
    seen: set[str] = set()
    index = start
    while True:
        made = example(category, index)
        index += 1
        if made.held_out != held_out:
            continue
        if held_out:
            asked = made.messages[-1]["content"]
            if asked in seen:
                continue
            seen.add(asked)
        yield made


def library_documents(max_bytes: int = 6_000_000) -> list[str]:
    """Source files of the running interpreter's standard library, in a fixed order, without tests."""
    root = Path(os.__file__).parent
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "encodings", "__pycache__"}
    paths = [path for path in root.rglob("*.py") if not skip & set(path.relative_to(root).parts)]
    paths.sort(key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    documents: list[str] = []
    size = 0
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 500 < len(text) < 120_000 and size < max_bytes:
            documents.append(text)
            size += len(text)
    return documents


def write_prompts(directory: Path, count: int = 32) -> None:
    """Write `{category}.jsonl`: the first `count` held-out prompts of each category."""
    directory.mkdir(parents=True, exist_ok=True)
    for category in CATEGORIES:
        source = examples(category, held_out=True)
        lines = []
        for number in range(count):
            record = {
                "id": f"{category}-{number:02d}",
                "category": category,
                "messages": list(next(source).messages),
            }
            lines.append(json.dumps(record, ensure_ascii=False))
        (directory / f"{category}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_training_prompts(file: Path, count: int) -> None:
    """Write a JSONL file of about `count` training prompts, for `dflash-trt train regenerate`."""
    lines = []
    for category, share in TRAINING_SHARES.items():
        source = examples(category, held_out=False, start=TRAINING_START)
        for number, made in enumerate(islice(source, round(count * share))):
            record = {
                "id": f"{category}-{number}",
                "category": category,
                "messages": list(made.messages),
            }
            lines.append(json.dumps(record, ensure_ascii=False))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write the shipped held-out prompts, or training prompts for a drafter."
    )
    parser.add_argument("--count", type=int, default=5000, help="training prompts")
    parser.add_argument("--out", type=Path, help="training prompts as JSONL, instead of the held-out ones")
    arguments = parser.parse_args()
    if arguments.out is not None:
        write_training_prompts(arguments.out, arguments.count)
    else:
        write_prompts(SHIPPED_PROMPTS)


if __name__ == "__main__":
    main()
