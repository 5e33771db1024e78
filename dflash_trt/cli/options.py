"""How commands declare their options, and the options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from dflash_trt.cli.output import loading
from dflash_trt.engines import registry
from dflash_trt.engines.base import EngineOptions
from dflash_trt.options import YEARS, Option, options_of

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.decoding.params import DraftingOptions
    from dflash_trt.llm import LLM

DEBUG = "show the traceback of an error"
LOG_LEVEL = "what is logged on standard error"
T = TypeVar("T")
N = TypeVar("N", int, float)


_NAMES = ("BUNDLE", "FILE", "NAME", "NAME_OR_PATH", "URL")


def option(
    parser: argparse._ActionsContainer,
    flag: str,
    metavar: str | None,
    kind: Callable[[str], Any],
    text: str = "",
    default: Any = None,
    **more: Any,
) -> None:
    """Add an option with a value of this kind. Its help ends with the default, if it has one."""
    values, convert = default if isinstance(default, list | tuple) else [default], kind
    if kind is Path or (kind is str and metavar in _NAMES):

        def convert(text: str) -> Any:
            return kind(named(text))

    if values and default is not None:
        shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        text = f"{text} (default: {shown})" if text else f"default: {shown}"
    parser.add_argument(flag, metavar=metavar, type=convert, help=text, default=default, **more)


def switch(
    parser: argparse._ActionsContainer, flag: str, text: str, default: bool | None = False, **more: Any
) -> None:
    """Add an option without a value. It is True if given, else `default`."""
    parser.add_argument(flag, action="store_true", help=text, default=default, **more)


def add_bundle(parser: argparse.ArgumentParser, name: str = "bundle", **more: Any) -> None:
    """Add the argument of a command that runs a bundle, and --engine. `bundle_of` reads both."""
    text = (
        "a directory made by `dflash-trt build`, or the name of a pair, which is built when it is first used"
    )
    parser.add_argument(name, metavar="BUNDLE", type=named, help=text, **more)
    add_engine(parser, "for which a pair is built at first use; auto: what this machine runs best")


def add_engine(parser: argparse.ArgumentParser, text: str) -> None:
    names = (registry.AUTO, *registry.NAMES)
    help = f"{text}; or {', '.join(registry.NAMES)}"
    option(parser, "--engine", "NAME", str, help, registry.AUTO, choices=names)


def bundle_of(args: argparse.Namespace) -> Bundle:
    """The bundle that was asked for. A known pair's is built into the cache at first use."""
    from dflash_trt.building.first_use import open_bundle

    return open_bundle(args.bundle, "size", args.engine)


def llm_of(args: argparse.Namespace) -> LLM:
    """The bundle that was asked for, opened for one sequence. On a terminal a line says so meanwhile."""
    with loading(args.bundle):
        from dflash_trt.llm import LLM

        return LLM(args.bundle, max_batch_size=1, exact=args.exact, engine=args.engine)


def named(text: str) -> str:
    """A name or a path. An empty one, as of a shell's variable that is not set, would be the current directory."""
    if not text:
        raise argparse.ArgumentTypeError("'' is empty, expected a name or a path")
    return text


def at_least(minimum: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return number


def up_to(most: str, kind: type[N]) -> Callable[[str], N]:
    """A number from 0 to `most`, which errors show as it is written."""

    def number(text: str) -> N:
        if not 0 <= (value := kind(text)) <= kind(most):
            raise argparse.ArgumentTypeError(f"{value} is not between 0 and {most}")
        return value

    return number


port = up_to("65535", int)  # 0 lets the system choose one
seconds = up_to(YEARS, float)


def or_auto(minimum: int) -> Callable[[str], int | None]:
    """A number of at least `minimum`, or None for `auto`."""

    def number(text: str) -> int | None:
        return None if text == "auto" else at_least(minimum)(text)

    return number


def add_target(parser: argparse.ArgumentParser, text: str = "the model that decides the tokens") -> None:
    option(parser, "--target", "NAME_OR_PATH", named, text, required=True)


def add_limit(parser: argparse.ArgumentParser, default: int) -> None:
    """Add --limit, the number of prompts that `read_prompts` takes."""
    option(
        parser, "--limit", "N", at_least(0), "only N prompts, from every category in turn; 0: all", default
    )


# Options of several commands: how a value is written, what reads it, and the help. Without a reader there is no value.
_COMMON: dict[str, tuple[str, Callable[[str], Any] | None, str]] = {
    "--prompts": ("FILE", Path, "a JSONL file (default: the shipped prompts)"),
    "--threads": ("N", at_least(1), "CPU threads per pass (default: all)"),
    "--block-length": (
        *("auto|N", or_auto(1)),
        "tokens verified per round (default: auto, the length that is expected to be fastest in each round)",
    ),
    "--tree-nodes": (
        *("auto|N", or_auto(0)),
        "nodes of the tree that a round verifies, of a bundle built with --tree-width; 0: chains (default: auto, the "
        "number that is expected to be fastest)",
    ),
    "--draft-source": (
        *("SOURCES", str),
        "where drafts come from: drafter, lookup (what followed the same words earlier in prompt or answer), or "
        "drafter,lookup (default)",
    ),
    "--exact": (
        *("", None),
        "run only passes that give a row the same bits, measured at first use, so that drafts change no token",
    ),
    "--json": ("", None, "print one JSON document instead"),
}
DRAFTING = ("--block-length", "--tree-nodes", "--draft-source", "--exact")


def add_common(parser: argparse._ActionsContainer, *flags: str) -> None:
    """Add options of `_COMMON`. One that is not given is None."""
    for flag in flags:
        metavar, read, text = _COMMON[flag]
        if read is None:
            switch(parser, flag, text, default=None)
        else:
            option(parser, flag, metavar, read, text)


def drafting_of(args: argparse.Namespace) -> DraftingOptions:
    """What the options `DRAFTING` ask for."""
    asked: DraftingOptions = {"block_length": args.block_length, "tree_nodes": args.tree_nodes}
    if args.draft_source is not None:
        asked["draft_source"] = args.draft_source
    return asked


def list_of(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def values(text: str) -> list[T]:
        return [kind(item) for item in text.split(",")]

    return values


def add_fields(
    parser: argparse._ActionsContainer, settings: type, *, given_only: bool = False, **defaults: Any
) -> None:
    """Add the options that the fields of a dataclass declare. `fields_of` reads them.

    given_only: an option that is not given is None, and the help names no default. defaults: in place of the fields'.
    """
    for o in options_of(settings):
        if o.kind is bool:
            switch(parser, o.flag, o.help, dest=o.name)
            continue
        default = None if given_only or o.default is MISSING else defaults.get(o.name, o.default)
        more = {"required": True} if o.default is MISSING and not given_only else {}
        convert, form = _reader(o)
        option(parser, o.flag, o.metavar, convert, o.help, default, dest=o.name, **more, **form)


def _reader(o: Option) -> tuple[Callable[[str], Any], dict[str, Any]]:
    """What reads an option's value, and argparse's arguments for a choice, several options or several words."""
    form, values = get_origin(o.kind), get_args(o.kind)
    if form is Literal:
        return str, {"choices": values}
    kind: Any = values[0] if values else o.kind
    read = o.parse or (up_to(o.most, kind) if o.most else kind if o.least is None else at_least(o.least))
    if form is list:
        return read, {"action": "append"}
    return (read, {"nargs": "+"}) if form is tuple else (list_of(read) if form else read, {})


def fields_of(args: argparse.Namespace, settings: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a dataclass or a function that have the names of options."""
    return {name: getattr(args, name) for name in signature(settings).parameters if hasattr(args, name)}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that belong to an engine: added, read and refused as its options class says."""
    for kind, engines in registry.names_by_options().items():
        batch = f", and --max-batch-size (default: {kind.batch})" if kind.batch else ""
        group = parser.add_argument_group(kind.title, f"with --engine {' or '.join(engines)}{batch}")
        add_fields(group, kind, given_only=True)


def refuse_other_engines(args: argparse.Namespace) -> None:
    """End the program, as for wrong usage, where an option is given that belongs to another engine."""
    for kind, engines in registry.names_by_options().items():
        flags = [o.flag for o in options_of(kind) if getattr(args, o.name) is not None]
        if flags and kind is not registry.find(args.engine).options:
            args.usage_error(f"{', '.join(flags)}: only with --engine {' or '.join(engines)}")


def engine_options_of(args: argparse.Namespace) -> EngineOptions | None:
    """The options of the engine that was asked for; None where it has none.

    Ends the program, as for wrong usage, where one is missing.
    """
    kind = registry.find(args.engine).options
    if kind is None:
        return None
    asked = {name: value for name, value in fields_of(args, kind).items() if value is not None}
    for o in options_of(kind):
        if o.default is MISSING and o.name not in asked:
            args.usage_error(f"--engine {args.engine} needs {o.flag}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()})
