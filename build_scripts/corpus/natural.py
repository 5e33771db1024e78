"""Training prompts in natural language, for a drafter of a general chat model.

    python -m build_scripts.corpus.natural --count 6000 --out prompts.jsonl

Eight categories take turns. A prompt depends only on its category and number, so a larger count extends the file.
Repetitions and prompts similar to a held-out prompt (dflash_trt/shipped/prompts/natural) are left out. Summary and
code prompts contain text from Python's own documentation and library, under the PSF licence. Everything else is ours.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import dflash_trt
from build_scripts import harness
from build_scripts.corpus.natural_forms import FORMS, Messages, prompt

HELD_OUT = Path(dflash_trt.__file__).parent / "shipped" / "prompts" / "natural"
MOST_ALIKE = 0.5


def shingles(messages: Messages) -> frozenset[str]:
    """Runs of three words of a prompt, for comparing prompts; the single words of a short prompt."""
    words = " ".join(message["content"] for message in messages).lower().split()
    return frozenset(" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2)))


def alike(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity of two prompts' shingles."""
    return len(one & other) / len(one | other)


class Index:
    """Prompts indexed by their shingles. Finds similar prompts without comparing with all."""

    def __init__(self, entries: Iterable[frozenset[str]]) -> None:
        self._holders: dict[str, list[frozenset[str]]] = {}
        for entry in entries:
            for shingle in entry:
                self._holders.setdefault(shingle, []).append(entry)

    def closest(self, prompt: frozenset[str]) -> float:
        """The similarity of the most similar entry."""
        sharing = {entry for shingle in prompt for entry in self._holders.get(shingle, ())}
        return max((alike(prompt, entry) for entry in sharing), default=0.0)


def held_out(directory: Path = HELD_OUT) -> Iterator[dict[str, object]]:
    """The shipped prompts, which are never trained on."""
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def prompts(count: int, excluded: Iterable[frozenset[str]], first: int = 0) -> Iterator[dict[str, object]]:
    """`count` training prompts, taking the categories in turn."""
    kept = Index(excluded)
    seen: set[str] = set()
    number, made = first, 0
    while made < count:
        category = list(FORMS)[number % len(FORMS)]
        messages = prompt(random.Random(f"{category}/{number}"), category)
        number += 1
        text = json.dumps(messages)
        if text in seen or kept.closest(shingles(messages)) > MOST_ALIKE:
            continue
        seen.add(text)
        made += 1
        yield {"id": f"{category}-{number - 1}", "category": category, "messages": messages}


def main() -> None:
    """Write training prompts."""
    parser = harness.parser(__doc__)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--first", type=int, default=0, help="number of the first prompt")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    excluded = [shingles(prompt["messages"]) for prompt in held_out()]  # type: ignore[arg-type]
    lines = [
        json.dumps(prompt, ensure_ascii=False)
        for prompt in prompts(arguments.count, excluded, arguments.first)
    ]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
