"""`dflash-trt plan --curve`: tokens per second by the number of requests, from a model of a pass's time."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.cli.options import at_least, each, option, switch
from dflash_trt.cli.output import print_json, print_table, print_text, write_chart

if TYPE_CHECKING:
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.planning.acceptance import Acceptance
    from dflash_trt.planning.curve import Curves
    from dflash_trt.planning.settings import Settings

# Options of the memory plan that the curves vary themselves, with their defaults.
_FIXED = {"tensor_parallel": 1, "max_seq_len": None, "max_batch_size": 8}
_ONLY = ("context", "acceptance", "blocks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the curves, in a group of their own."""
    group = parser.add_argument_group("times", "of one B200, from a model of a pass's time")
    switch(group, "--curve", "show tokens per second, plain and with drafts, by requests at a time")
    option(group, "--context", "N", at_least(1), "rows of cache of each request (default: 1000)")
    option(group, "--acceptance", "TABLE", str,
           "tokens per round by block length, such as 4=3.1,8=4.1, or a report of `train evaluate --json` (default: "
           "the published ones of the pair)")  # fmt: skip
    option(group, "--blocks", "K,...", each(at_least(2)), "block lengths (default: those of the acceptance)")


def check_arguments(args: argparse.Namespace) -> None:
    """End the program if options of the curves are used without --curve, or with options that the curves vary."""
    if given := [f"--{name}" for name in _ONLY if getattr(args, name) is not None and not args.curve]:
        args.usage_error(f"{', '.join(given)}: only with --curve")
    fixed = [name for name in _FIXED if getattr(args, name) not in (None, _FIXED[name])]
    if args.curve and fixed:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        args.usage_error(
            f"{flags.replace('--tensor-parallel', '--tp')}: not with --curve, which has 1 to 32 requests on one GPU "
            "(--context: their length)"
        )


def run(
    args: argparse.Namespace,
    inventory: Inventory,
    settings: Settings,
    formats: Collection[str],
    refused: str | None,
) -> int:
    """`formats`: those of the weights. `refused`: why the engine builds nothing for this GPU, if so."""
    from dflash_trt.checkpoint.catalogue import known_pair
    from dflash_trt.errors import BuildError
    from dflash_trt.planning.curve import USUAL_CONTEXT, check_confirmed, compute_curves

    check_confirmed(inventory, settings, formats)
    if refused is not None:
        raise BuildError(f"{settings.engine}: a build for {settings.gpu.name} is refused: {refused}")
    pair = known_pair(args.target)
    name = Path(args.target).name if pair is None else pair.name
    acceptance = _acceptance(args, name)
    curves = compute_curves(
        inventory,
        settings,
        acceptance,
        name=name,
        context=args.context or USUAL_CONTEXT,
        blocks=_blocks(args, acceptance, inventory.drafter.block_size),
    )
    if args.svg:
        from dflash_trt.reports.charts import curve_chart

        lines = {
            name: [(point.speed, point.throughput) for point in points]
            for name, points in curves.points.items()
        }
        title = f"{curves.target} on one {curves.gpu}, {curves.context} tokens of context (model)"
        x, y = "tokens per second of one user", "tokens per second of the GPU"
        write_chart(args.svg, curve_chart(lines, title=title, x=x, y=y))
    if args.json:
        print_json(curves.to_dict())
    else:
        _print(curves)
    return 0


def _acceptance(args: argparse.Namespace, name: str) -> Acceptance:
    from dflash_trt.errors import UsageError
    from dflash_trt.planning.acceptance import parse, published

    acceptance = published(name) if args.acceptance is None else parse(args.acceptance)
    if acceptance is None:
        raise UsageError(
            f"no acceptance length of {name} is published: give --acceptance, such as 4=3.1,8=4.1, or a report "
            "of `dflash-trt train evaluate --json`"
        )
    return acceptance


def _blocks(args: argparse.Namespace, acceptance: Acceptance, trained: int) -> Sequence[int]:
    blocks: Sequence[int] = args.blocks or sorted(acceptance.lengths)
    if longest := [block for block in blocks if block > trained]:
        option = "--blocks" if args.blocks else "--acceptance"
        args.usage_error(f"{option} has {longest[0]}: the drafter was trained for blocks of {trained}")
    return blocks


def _print(curves: Curves) -> None:
    from dflash_trt.planning.curve import PLAIN

    print_text(
        f"{curves.target} on one {curves.gpu}, {curves.context} tokens of context; a model, not a measured curve"
    )
    print_text(f"times: {curves.times}")
    print_text(f"acceptance: {curves.acceptance.source}")
    plain = curves.points[PLAIN]
    batches = ("requests", *(str(point.batch) for point in plain))
    speeds = [(PLAIN, *(f"{point.speed:.0f}" for point in plain))]
    for name in curves.blocks:
        both = zip(curves.points[name], plain, strict=True)
        speeds.append((name, *(f"{drafted.speed / alone.speed:.2f}x" for drafted, alone in both)))
    print("\ntokens/s of one user, with drafts relative to plain decoding:")
    print_table([batches, *speeds])
    print("\ntokens/s of the GPU:")
    rates = ((name, *(f"{p.throughput:.0f}" for p in points)) for name, points in curves.points.items())
    print_table([batches, *rates])
