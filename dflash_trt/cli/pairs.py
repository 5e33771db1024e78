"""`dflash-trt pairs`: the pairs with a name, and the published drafters."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.options import add_common
from dflash_trt.cli.output import print_json, print_table

if TYPE_CHECKING:
    from dflash_trt.checkpoint.catalogue import KnownPair, PublishedDrafter, TargetForm
    from dflash_trt.engines.base import Engine

SUMMARY = "list the known pairs, and published drafters"
DESCRIPTION = (
    "List the target and drafter pairs that `build --target` knows by name, and the published drafters that\n"
    "`build --drafter REPOSITORY` takes. With a name or repository: all that is known of one, with the forms of its\n"
    "target and the engines that take it. With a target's directory: the drafter in its checkpoint, if it has one."
)
EXAMPLES = """\
examples:
  dflash-trt pairs
  dflash-trt pairs qwen3.8-27b
  dflash-trt pairs --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a pair, a repository of a target or drafter, or the directory of a target",
    )
    add_common(parser, "--json")


def run(args: argparse.Namespace) -> int:
    from dflash_trt.checkpoint.catalogue import PAIRS, PUBLISHED

    if args.name is not None:
        return _show(args.name, as_json=args.json)
    if args.json:
        drafters = [_as_json(drafter) for drafter in PUBLISHED]
        print_json({"pairs": list(map(_pair_as_json, PAIRS)), "drafters": drafters})
        return 0
    rows = []
    for pair in PAIRS:
        notes = [pair.note, *(form.format for form in pair.forms if form.name)]
        rows += [(name, str(pair.block_size), note) for name, note in zip(pair.names, notes, strict=True)]
    print_table([("name", "block", "note"), *rows], headings=1, right=[1])
    for reason in dict.fromkeys(drafter.unread for drafter in PUBLISHED):
        listed = [(drafter.repository, drafter.kind) for drafter in PUBLISHED if drafter.unread == reason]
        print()
        heading = f"not read: {reason}" if reason else "published drafters"
        print_table([(heading, "kind"), *listed], headings=1)
    return 0


def _pair_as_json(pair: KnownPair) -> dict[str, Any]:
    from dflash_trt.checkpoint.mtp import ARCHITECTURES, MTP

    own_drafter = (
        f"--drafter {MTP}, where the target's files have tensors mtp.*"
        if pair.family in ARCHITECTURES
        else ""
    )
    return {**dataclasses.asdict(pair), "in_its_checkpoint": own_drafter}


def _as_json(drafter: PublishedDrafter, form: TargetForm | None = None) -> dict[str, Any]:
    """form: of its target, if that is not the first one."""
    from dflash_trt.checkpoint.catalogue import pair_of

    pair = pair_of(drafter)
    more = {
        "publisher": drafter.repository.partition("/")[0],
        "read": not drafter.unread,
        "engines": _engines(drafter, form),
    }
    return {**dataclasses.asdict(drafter), **more, "pair": None if pair is None else pair.name}


def _show(name: str, *, as_json: bool) -> int:
    """All that is known of one pair or drafter."""
    from dflash_trt.checkpoint.catalogue import LOOKED_UP, NAMES, PUBLISHED, find_drafter, known_pair, pair_of
    from dflash_trt.checkpoint.mtp import MTP, has_own_drafter
    from dflash_trt.errors import CheckpointError, did_you_mean

    if Path(name).is_dir():
        mtp = MTP if has_own_drafter(Path(name)) else None
        if as_json:
            print_json({"target": name, "in_its_checkpoint": mtp})
        else:
            print_table(
                [("target", name), ("in its checkpoint", f"--drafter {mtp}" if mtp else "no drafter")]
            )
        return 0
    pair, drafter = known_pair(name), find_drafter(name)
    if drafter is not None:
        pair = pair_of(drafter)
    elif pair is not None and pair.drafter_repo is not None:
        drafter = find_drafter(pair.drafter_repo)
    if pair is None and drafter is None:
        near = did_you_mean(name, [*NAMES, *(published.repository for published in PUBLISHED)])
        raise CheckpointError(
            f"{name}: no pair and no drafter in the list has this name{near}; pairs: {', '.join(NAMES)}"
        )
    form = next((form for form in pair.forms if form.name == pair.name), None) if pair else None
    known = {"pair": pair and _pair_as_json(pair), "drafter": drafter and _as_json(drafter, form)}
    if as_json:
        print_json({**known, "looked_up": LOOKED_UP})
    else:
        rows = [row for fields in known.values() if fields for row in _rows(fields)]
        print_table([*rows, ("looked up", LOOKED_UP)])
    return 0


def _rows(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The fields that say something, and a row for each form of the target and each engine."""
    for name, value in fields.items():
        if name == "forms":
            for form in value:
                why = f": {form['unread']}" if form["unread"] else ""
                yield (
                    f"as {form['name']}" if form["name"] else "not read",
                    f"{form['repository']}: {form['format']}{why}",
                )
        elif name == "engines":
            yield from ((engine, f"no: {why}" if why else "yes") for engine, why in value.items())
        elif name != "read" and value not in (None, "", False, ()):  # the engines' rows say that
            texts = value if isinstance(value, list | tuple) else ["yes" if value is True else str(value)]
            yield name.replace("_", " "), ", ".join(texts)


def _engines(drafter: PublishedDrafter, form: TargetForm | None) -> dict[str, str]:
    """Engine -> why it does not take this drafter, or this form of its target; empty where it does."""
    from dflash_trt.engines import registry

    def why(engine: Engine) -> str:
        if drafter.unread:
            return f"{drafter.unread} is not read"
        if drafter.only not in ("", engine.name):
            return f"only {drafter.only} runs the target"
        return engine.refuses_published(drafter, form)

    return {engine.name: why(engine) for engine in registry.engines()}
