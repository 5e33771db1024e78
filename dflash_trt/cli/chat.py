"""`dflash-trt chat`: a conversation with a bundle, with the accepted drafts as they come."""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dflash_trt.cli import generate
from dflash_trt.cli.options import (
    DRAFTING,
    add_bundle,
    add_common,
    add_fields,
    drafting_of,
    fields_of,
    llm_of,
    option,
    switch,
)
from dflash_trt.decoding.params import SamplingParams

if TYPE_CHECKING:
    from dflash_trt.decoding.params import DraftingOptions
    from dflash_trt.decoding.results import Statistics
    from dflash_trt.llm import LLM

SUMMARY = "talk with a bundle, and see its drafts accepted"
DESCRIPTION = """\
Talk with a bundle. Answers appear as they are generated. On a terminal with colours, drafts that the target accepted
are coloured, in a second colour if they repeat the conversation. A line below each answer has its speed and its
tokens per verification pass of the target.

Ctrl-C stops an answer. These lines are commands:
  /reset         begin a new conversation
  /system TEXT   begin a new conversation with a system message
  /draft on|off  draft or not
  /stats         show all answers together
  /quit          end, as Ctrl-D does
"""
EXAMPLES = """\
examples:
  dflash-trt chat bundles/smollm2-135m
  dflash-trt chat bundles/smollm2-135m --system "Answer in one sentence." --temperature 0.7
  echo "Why is the sky blue?" | dflash-trt chat bundles/smollm2-135m
"""
PROMPT = "> "
DRAFTED, COPIED = "cyan", "yellow"  # of the drafter, and of the text itself
MAX_TOKENS = 512  # of an answer
COMMANDS = ("/reset", "/system", "/draft", "/stats", "/quit", "/help")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    option(parser, "--system", "TEXT", str, "the system message")
    generate.add_chat_template_arguments(parser)
    switch(parser, "--no-draft", "begin without drafts")
    add_common(parser, *DRAFTING)
    add_fields(parser.add_argument_group("sampling"), SamplingParams, max_tokens=MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    params = SamplingParams(**fields_of(args, SamplingParams))
    with llm_of(args) as llm:
        conversation = Conversation(llm, params, args)
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() a history and editing
            print(f"{args.bundle}: up to {llm.max_seq_len} tokens. /help shows the commands, Ctrl-D ends.")
        while (line := _read()) is not None:
            if line.startswith("/") and line.split()[0] in COMMANDS:
                if not conversation.command(line):
                    break
            elif re.match(r"/[a-z]+(\s|$)", line):
                conversation.note(f"{line.split()[0]} is no command; see /help")
            elif line:
                conversation.ask(line)
    return 0


def _read() -> str | None:
    """A line of the user; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    while True:
        try:
            return input(PROMPT).strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


class Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, args: argparse.Namespace) -> None:
        from rich.console import Console

        self.llm, self.params = llm, params
        self.console = Console(highlight=False, soft_wrap=True)
        self.system, self.variables = args.system, args.chat_template_kwargs
        self.drafting: DraftingOptions = {"speculate": not args.no_draft, **drafting_of(args)}
        self.messages: list[dict[str, Any]] = []
        self.statistics: list[Statistics] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation, with the system message if there is one."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash. False ends the conversation."""
        from dflash_trt.decoding.results import Statistics

        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        if name in ("/reset", "/system"):
            self.system = rest or None if name == "/system" else self.system
            self.reset()
            self.note("new conversation")
        elif name == "/draft" and rest in ("on", "off"):
            self.drafting["speculate"] = rest == "on"
            self.note(f"drafts {rest}")
        elif name == "/stats":
            self.note(figures_of(Statistics.merge(self.statistics)) if self.statistics else "no answer yet")
        else:
            print(DESCRIPTION.partition("These lines")[2].partition(":\n")[2], end="")
        return True

    def ask(self, text: str) -> None:
        """Answer a message. An answer that is stopped stays in the conversation as far as it came."""
        from dataclasses import replace

        from dflash_trt.decoding.output import Detokenizer
        from dflash_trt.errors import RequestError

        messages = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            prompt = self.llm.chat_prompt(messages, self.variables)
            left = self.llm.max_seq_len - len(prompt)
            if left < 1:
                raise RequestError(
                    f"the conversation has {len(prompt)} tokens, and the bundle holds {len(prompt) + left}"
                )
        except RequestError as error:
            self.note(f"{error}; /reset begins a new conversation")
            return
        params = replace(self.params, max_tokens=min(self.params.max_tokens, left))
        detokenizer, first = Detokenizer(self.llm.tokenizer.backend), True
        stream = self.llm.stream(prompt, params, **self.drafting)
        try:
            for chunk in stream:
                # The last token of a round is the target's own. Those before it are drafts that it accepted.
                copied = len(chunk.token_ids) - 1 - sum(numbers[3] for numbers in chunk.rounds)
                for part, style in (((0, copied), DRAFTED), ((copied, -1), COPIED), ((-1, None), "")):
                    self._print(detokenizer.push(chunk.token_ids[slice(*part)]), "" if first else style)
                answer, first = answer + chunk.text, False
                if chunk.statistics is not None:
                    self._print(detokenizer.flush())
                    self.statistics.append(chunk.statistics)
        except KeyboardInterrupt:
            stream.close()  # type: ignore[attr-defined]
            self._print("\n")
            self.note("stopped")
        else:
            self._print("\n")
            self.note(figures_of(self.statistics[-1]))
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def note(self, text: str) -> None:
        """Print a line that is no part of the conversation."""
        self._print(f"[{text}]\n", "dim")

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(text, style), end="")
        sys.stdout.flush()


def figures_of(s: Statistics) -> str:
    """Speed, tokens per pass and trees, on a line. Times to first tokens count for each answer."""
    seconds = s.num_requests * s.time_to_first_token + s.generation_time  # the first is a mean of all answers
    text = f"{s.num_generation_tokens} tokens, {s.num_generation_tokens / max(seconds, 1e-9):.0f} tokens/s"
    if not s.num_drafts:
        return f"{text}, no drafts"
    drafts = f"{text}, {s.tokens_per_pass:.2f} tokens per pass with {s.num_drafts} drafts"
    return f"{drafts}; trees in {generate.trees_of(s)}" if s.num_trees else drafts
