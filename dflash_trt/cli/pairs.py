"""`dflash-trt pairs`: the pairs with a name, and the published drafters."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from dflash_trt.cli.options import add_json
from dflash_trt.cli.output import print_json, print_table

if TYPE_CHECKING:
    from dflash_trt.checkpoint.catalogue import KnownPair, PublishedDrafter, TargetForm
    from dflash_trt.engines.base import EngineEntry

SUMMARY = "list the known pairs, and published drafters"
DESCRIPTION = (
    "List the target and drafter pairs that `build --target` knows by name, and the published drafters. With a name or "
    "repository: all that is known of one, with the forms of its target and the engines that take it. "
    "`build --drafter REPOSITORY` takes any drafter that is read."
)
EXAMPLES = """\
examples:
  dflash-trt pairs
  dflash-trt pairs qwen3.8-27b
  dflash-trt pairs --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of one, and the form of the output."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a pair, or a repository of a target or drafter"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print all pairs and drafters, or all that is known of one."""
    from dflash_trt.checkpoint.catalogue import PAIRS, PUBLISHED

    if args.name is not None:
        return _show(args.name, as_json=args.json)
    if args.json:
        drafters = [_as_json(drafter) for drafter in PUBLISHED]
        print_json({"pairs": [dataclasses.asdict(pair) for pair in PAIRS], "drafters": drafters})
        return 0
    rows = [(pair.name, str(pair.block_size).rjust(len("block")), pair.note) for pair in PAIRS]
    print_table([("name", "block", "note"), *rows], heading=True)
    for reason in dict.fromkeys(drafter.unread for drafter in PUBLISHED):
        listed = [(each.repository, each.kind) for each in PUBLISHED if each.unread == reason]
        print()
        heading = f"not read: {reason}" if reason else "published drafters"
        print_table([(heading, "kind"), *listed], heading=True)
    return 0


def _as_json(drafter: PublishedDrafter) -> dict[str, Any]:
    from dflash_trt.checkpoint.catalogue import pair_of

    pair = pair_of(drafter)
    more = {"publisher": drafter.publisher, "read": drafter.read, "engines": _engines(drafter, None)}
    return {**dataclasses.asdict(drafter), **more, "pair": None if pair is None else pair.name}


def _show(name: str, *, as_json: bool) -> int:
    """All that is known of one pair or drafter."""
    from dflash_trt.checkpoint.catalogue import (
        LOOKED_UP,
        NAMES,
        PAIRS,
        PUBLISHED,
        find_drafter,
        known_pair,
        pair_of,
    )
    from dflash_trt.errors import CheckpointError, did_you_mean

    pair, drafter = known_pair(name), find_drafter(name)
    if drafter is not None:
        pair = pair_of(drafter)
    elif pair is not None and pair.drafter_repo is not None:
        drafter = find_drafter(pair.drafter_repo)
    if pair is None and drafter is None:
        near = did_you_mean(name, [*(p.name for p in PAIRS), *(each.repository for each in PUBLISHED)])
        raise CheckpointError(
            f"{name}: no pair and no drafter in the list has this name{near}; pairs: {NAMES}"
        )
    if as_json:
        known = {"pair": pair and dataclasses.asdict(pair), "drafter": drafter and _as_json(drafter)}
        print_json({**known, "looked_up": LOOKED_UP})
        return 0
    print_table([*_pair_rows(pair), *_drafter_rows(drafter, _form(pair)), ("looked up", LOOKED_UP)])
    return 0


def _pair_rows(pair: KnownPair | None) -> list[tuple[str, str]]:
    if pair is None:
        return []
    own = "comes with the package"
    form = _form(pair)
    stored = form.format if form is not None else "MXFP4 experts" if pair.family == "gpt_oss" else "BF16"
    rows = [
        *(("name", pair.name), ("target", pair.target_repo or own), ("drafter", pair.drafter_repo or own)),
        *(("format", stored), ("family", pair.family), ("block", str(pair.block_size)), ("note", pair.note)),
        *(("mode", text) for text in (pair.warning,) if text),
        *(("quoted by", text) for text in (pair.source,) if text),
        *(("nobody confirms", text) for text in (", ".join(pair.unverified),) if text),
    ]
    for other in pair.forms:
        if other is not form:
            count = f"; {other.downloads:,} downloads in 30 days" if other.downloads else ""
            why = f": {reason}" if (reason := other.unread) else ""
            label = f"as {other.name}" if other.name else "not read"
            rows.append((label, f"{other.repository}: {other.format}{count}{why}"))
    return rows


def _form(pair: KnownPair | None) -> TargetForm | None:
    """The form of the target that a pair's name stands for, if that is not the first one."""
    return None if pair is None else next((form for form in pair.forms if form.name == pair.name), None)


def _drafter_rows(drafter: PublishedDrafter | None, form: TargetForm | None) -> list[tuple[str, str]]:
    if drafter is None:
        return []
    downloads = f"{drafter.downloads:,} in 30 days" if drafter.downloads else "not stated"
    engines = _engines(drafter, form)
    return [
        *(("published as", drafter.repository), ("for", drafter.target), ("kind", drafter.kind)),
        *((("format", "that of the library speculators"),) if drafter.speculators else ()),
        *((("block", str(drafter.block)),) if drafter.block else ()),
        *(("licence", drafter.licence), ("downloads", downloads)),
        *((engine, f"no: {why}" if why else "yes") for engine, why in engines.items()),
    ]


def _engines(drafter: PublishedDrafter, form: TargetForm | None) -> dict[str, str]:
    """Engine -> why it does not take this drafter, or this form of its target; empty where it does."""
    from dflash_trt.engines import registry

    def why(engine: EngineEntry) -> str:
        if drafter.unread:
            return f"{drafter.unread} is not read"
        if drafter.only not in ("", engine.name):
            return f"only {drafter.only} runs the target"
        return engine.refuses_published(drafter, form)

    return {each.name: why(each) for each in registry.engines()}
