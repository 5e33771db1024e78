"""Draw docs/terminal.svg: a conversation of `dflash-trt chat`, with the accepted drafts in colour.

    python -m build_scripts.recording [--bundle smollm2-135m] [--out docs/terminal.svg]

The answers are computed while the script runs; the speeds are of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
from inspect import signature
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

from build_scripts import harness
from dflash_trt import LLM
from dflash_trt.cli import chat, generate, make_parser
from dflash_trt.prompts import natural_prompts

ROOT = Path(__file__).parent.parent
# The first held-out natural prompts of a category: not chosen by their acceptance.
CATEGORY, NUMBER = "chat", 2
# The fonts that rich's format would fetch.
FONTS = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)


class Recorded(chat.Conversation):
    """A conversation whose output is kept."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        super().__init__(llm, generate.sampling_params(args, most=chat.MAX_TOKENS), args)
        self.text = Text()

    def _print(self, text: str, style: str = "") -> None:
        self.text.append(text, style)


def questions() -> list[str]:
    """What is asked."""
    asked = [prompt.content for prompt in natural_prompts(None, 0) if prompt.category == CATEGORY][:NUMBER]
    return [content if isinstance(content, str) else content[-1]["content"] for content in asked]


def record(bundle: str, max_tokens: int) -> str:
    """The SVG of a conversation with a bundle, or with a known pair."""
    words = ["chat", f"bundles/{Path(bundle).name}", "--max-tokens", str(max_tokens)]
    with LLM(bundle, max_batch_size=1) as llm:
        conversation = Recorded(llm, make_parser().parse_args(words))
        conversation.text.append(f"$ dflash-trt {' '.join(words)}\n", "bold")
        llm.generate(llm.chat_prompt([{"role": "user", "content": "Hello"}]))  # a warm-up
        for question in questions():
            conversation.text.append(f"{chat.PROMPT}{question}\n", "bold")
            conversation.ask(question)
    with open(os.devnull, "w") as nothing:
        console = Console(record=True, width=92, file=nothing, force_terminal=True)
        console.print(conversation.text)
    usual = signature(Console.export_svg).parameters["code_format"].default
    return console.export_svg(
        title="dflash-trt", theme=DIMMED_MONOKAI, code_format=FONTS.sub("", usual), unique_id="dflash"
    )


def main() -> None:
    """Draw the picture."""
    parser = harness.parser(__doc__)
    parser.add_argument("--bundle", default="smollm2-135m", help="a directory, or a known pair")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "terminal.svg")
    parser.add_argument("--max-tokens", type=int, default=72)
    args = parser.parse_args()
    args.out.write_text(record(args.bundle, args.max_tokens), encoding="utf-8")
    print(f"drew {args.out}")


if __name__ == "__main__":
    main()
