"""Types of options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.decoding.options import DraftingOptions

T = TypeVar("T")


def add_bundle(parser: argparse.ArgumentParser, **more: Any) -> None:
    """The argument of a command that runs a bundle. `bundle_of` reads it."""
    parser.add_argument(
        "bundle",
        metavar="BUNDLE",
        help="a directory made by `dflash-trt build`, or the name of a pair, which is built when it is first used",
        **more,
    )


def bundle_of(args: argparse.Namespace) -> Bundle:
    """The bundle that was asked for. A known pair's is built into the cache at first use."""
    from dflash_trt.building.first_use import open_bundle

    return open_bundle(args.bundle, "size")


def at_least(minimum: int) -> Callable[[str], int]:
    """An integer, `minimum` or more."""

    def number(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"{value} is below {minimum}")
        return value

    return number


def port(text: str) -> int:
    """A TCP port. 0 lets the system choose."""
    if not 0 <= (value := int(text)) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 65535")
    return value


def seconds(text: str) -> float:
    """A time, 0 or more, at most ten years."""
    if not 0 <= (value := float(text)) < 3e8:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 3e8")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return value


def block_length(text: str) -> int | None:
    """A block length, or None for `auto`."""
    return None if text == "auto" else at_least(1)(text)


def tree_nodes(text: str) -> int | None:
    """The nodes of a tree, 0 for chains, or None for `auto`."""
    return None if text == "auto" else at_least(0)(text)


def add_target(parser: argparse.ArgumentParser, text: str = "the model that decides the tokens") -> None:
    parser.add_argument("--target", required=True, metavar="NAME_OR_PATH", help=text)


def add_prompts(parser: argparse.ArgumentParser, kind: str = "shipped") -> None:
    """The file that `read_prompts` and `natural_prompts` take."""
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help=f"a JSONL file (default: the {kind} prompts)"
    )


def add_limit(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--limit",
        type=at_least(0),
        default=default,
        metavar="N",
        help=f"only N prompts, from every category in turn; 0: all (default: {default})",
    )


def add_threads(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--threads", type=at_least(1), metavar="N", help="CPU threads per pass (default: all)"
    )


def add_exact(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--exact", action="store_true", default=None,
        help="run only passes that give a row the same bits, measured at first use, so that drafts change no token",
    )  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")


def add_tree_nodes(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--tree-nodes", type=tree_nodes, metavar="auto|N",
        help="nodes of the tree that a round verifies, of a bundle built with --tree-width; 0: chains "
        "(default: auto, the number that is expected to be fastest)",
    )  # fmt: skip


def add_drafting(parser: argparse._ActionsContainer) -> None:
    """The options that `drafting_of` reads, and `add_exact`'s."""
    parser.add_argument(
        "--block-length", type=block_length, metavar="auto|N",
        help="tokens verified per round (default: auto, the length that is expected to be fastest in each round)",
    )  # fmt: skip
    add_tree_nodes(parser)
    add_exact(parser)


def drafting_of(args: argparse.Namespace) -> DraftingOptions:
    """What the options of `add_drafting` ask for."""
    return {"block_length": args.block_length, "tree_nodes": args.tree_nodes}


def each(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values separated by commas."""

    def numbers(text: str) -> list[T]:
        return [kind(item) for item in text.split(",")]

    return numbers
