"""`dflash-trt generate`: text from a bundle, printed as it is generated."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from dflash_trt.cli.output import print_json
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.errors import DFlashError, RequestError

if TYPE_CHECKING:
    from dflash_trt.decoding.params import DraftingOptions
    from dflash_trt.decoding.results import Statistics
    from dflash_trt.decoding.sampling.structure import StructuredOutputs

SUMMARY = "generate text from a prompt"
DESCRIPTION = """\
Generate text from a prompt and print it as it is generated. Drafts change the speed. They change no token on ONNX
Runtime with chains, nor with --exact; elsewhere rounding may decide between two tokens that are nearly equally likely.
"""
EXAMPLES = """\
examples:
  dflash-trt generate bundles/smollm2-135m --chat --prompt "What is the capital of Japan?" --stats
  dflash-trt generate bundles/smollm2-135m --chat -p "Write a haiku about the sea." --temperature 0.7 --seed 1
  dflash-trt generate bundles/smollm2-135m --chat -p "What is the capital of Japan?" --no-draft --json
  dflash-trt generate bundles/smollm2-135m --prompt "The sea is" --max-tokens 16
  dflash-trt generate bundles/smollm2-135m --chat -p "Describe a person." --json-schema person.json
  echo "What is the capital of Japan?" | dflash-trt generate bundles/smollm2-135m --chat

Chat models answer with --chat. Without it, the model goes on with the text of the prompt.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - or none reads standard input")
    switch(parser, "--chat", "send the prompt as a user message, through the chat template")
    option(parser, "--system", "TEXT", str, "with --chat: the system message")
    add_chat_template_arguments(parser, "with --chat: ")
    drafting = parser.add_argument_group("drafting")
    switch(drafting, "--no-draft", "the target alone, one token per pass")
    add_common(drafting, *DRAFTING)
    sampling = parser.add_argument_group("sampling")
    add_fields(sampling, SamplingParams)
    option(sampling, "--stop", "TEXT", str, "end before this text; may be repeated", action="append")
    group = parser.add_argument_group("form of the text, one of these (needs the package llguidance)")
    form = group.add_mutually_exclusive_group()
    option(form, "--json-schema", "FILE", Path, "JSON that fits the schema in this file")
    switch(form, "--json-object", "a JSON object")
    option(form, "--regex", "REGEX", str, "a text that this regular expression matches")
    option(form, "--choice", "TEXT", str, "one of these texts; may be repeated", action="append")
    option(form, "--grammar", "FILE", Path, "a text of the grammar in this file, Lark or GBNF")
    switch(parser, "--stats", "print speed and acceptance on standard error at the end")
    add_common(parser, "--json")


def add_chat_template_arguments(parser: argparse.ArgumentParser, note: str = "") -> None:
    """Add --chat-template-kwargs; `note` goes before its help."""
    text = note + "variables of the template, such as '{\"enable_thinking\": false}'"
    parser.add_argument("--chat-template-kwargs", type=_object, default={}, metavar="JSON", help=text)


def _object(text: str) -> dict[str, Any]:
    from dflash_trt.files.reading import parse_object

    try:
        return parse_object(text, "JSON")
    except DFlashError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _form(args: argparse.Namespace) -> StructuredOutputs | None:
    from dflash_trt import StructuredOutputs
    from dflash_trt.decoding.sampling.structure import MOST_CHARACTERS
    from dflash_trt.files.reading import read_text

    fields: dict[str, Any] = {"json_object": args.json_object, "regex": args.regex, "choice": args.choice}
    for name, path in (("json", args.json_schema), ("grammar", args.grammar)):
        fields[name] = None if path is None else read_text(path, 4 * MOST_CHARACTERS, RequestError)
    return (
        StructuredOutputs(**fields) if any(value not in (None, False) for value in fields.values()) else None
    )


@contextmanager
def _naming_form(args: argparse.Namespace) -> Iterator[None]:
    """Errors about a form that a file has name its option and the file."""
    try:
        yield
    except RequestError as error:
        for name, option, file in (
            ("json", "--json-schema", args.json_schema), ("grammar", "--grammar", args.grammar)
        ):  # fmt: skip
            if file and re.match(rf"structured_outputs\b|{name}\b", str(error)):
                raise RequestError(f"{option} {file}: {error}") from error
        raise


def run(args: argparse.Namespace) -> int:
    if args.system is not None and not args.chat:
        args.usage_error("--system needs --chat")
    if args.chat_template_kwargs and not args.chat:
        args.usage_error("--chat-template-kwargs needs --chat")
    if args.prompt is None and sys.stdin.isatty():
        args.usage_error("no prompt: give it with --prompt, or on standard input")

    with _naming_form(args):
        form = {"stop": tuple(args.stop or ()), "structured_outputs": _form(args)}
        params = SamplingParams(**fields_of(args, SamplingParams) | form)
    drafting: DraftingOptions = {"speculate": not args.no_draft, **drafting_of(args)}
    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    with llm_of(args) as llm, _naming_form(args):
        if args.chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            prompt = llm.chat_prompt(
                [*system, {"role": "user", "content": prompt}], args.chat_template_kwargs
            )
        if args.json:
            completion = llm.generate(prompt, params, **drafting)
            print_json({**vars(completion), "statistics": completion.statistics.to_dict()})
            return 0
        for chunk in llm.stream(prompt, params, **drafting):
            print(chunk.text, end="", flush=True)
    print()
    if args.stats and chunk.statistics is not None:
        _print_statistics(chunk.statistics)
    return 0


def _print_statistics(statistics: Statistics) -> None:
    s, count = statistics, statistics.num_generation_tokens
    seconds = s.time_to_first_token + s.generation_time
    lengths = ", ".join(f"{length} x {n}" for length, n in enumerate(s.block_length_histogram) if n)
    lines = [
        f"{count} tokens in {seconds:.2f} s, {count / seconds:.0f} tokens/s",
        f"first token after {s.time_to_first_token * 1e3:.0f} ms, {s.num_prompt_tokens} prompt tokens",
        f"{s.tokens_per_pass:.2f} tokens per pass with {s.num_drafts} drafts, "
        f"acceptance rate {s.draft_acceptance_rate:.0%}",
        f"tokens verified per round: {lengths or 'no round'}",
        *([f"trees: {trees_of(s)}"] if s.num_trees else []),
        f"seconds: prefill {s.prefill_time:.3f}, draft {s.draft_time:.3f}, verify {s.verify_time:.3f}, "
        f"host {s.host_time:.3f}",
    ]
    print("\n".join(lines), file=sys.stderr)


def trees_of(s: Statistics) -> str:
    """How many rounds verified a tree, and of how many nodes: 12 of 40 rounds, 16.0 nodes each."""
    return f"{s.num_trees} of {sum(s.block_length_histogram)} rounds, {s.mean_tree_nodes:.1f} nodes each"
