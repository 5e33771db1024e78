"""`dflash-trt plan --slo`: the setting for a time per token, which `build --from-plan` takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_trt.cli.output import print_json, print_table, print_text

if TYPE_CHECKING:
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.planning.acceptance import Acceptance
    from dflash_trt.planning.memory import Settings
    from dflash_trt.planning.slo import Choice


def precisions(args: argparse.Namespace, inventory: Inventory, settings: Settings) -> Iterator[str | None]:
    """The precisions to compare: the one that was asked for; or as stored, then those that the GPU computes in."""
    from dflash_trt.cli import engine_options
    from dflash_trt.engines import registry
    from dflash_trt.errors import BuildError
    from dflash_trt.formats import FORMATS
    from dflash_trt.formats.precision import parse_precision

    yield args.precision
    if args.precision is not None or inventory.quantized("target"):
        return
    engine, options = registry.find(args.engine), engine_options.from_arguments(args, plan=True)
    for name, form in FORMATS.items():
        text = f"target={name}"
        try:
            engine.check(parse_precision(text), "copy", options)
        except BuildError:  # the engine has no weights of its own
            continue
        if form.capabilities is not None and settings.gpu.sm in form.capabilities:
            yield text


def choices(
    args: argparse.Namespace,
    inventory: Inventory,
    settings: Settings,
    acceptance: Acceptance,
    blocks: Sequence[int],
    *,
    name: str,
    context: int,
) -> tuple[list[tuple[str | None, Choice | None]], str]:
    """The best setting in each precision, and the source of the times."""
    from dflash_trt.formats.precision import parse_precision
    from dflash_trt.planning.layouts import model_layouts
    from dflash_trt.planning.operators import best_layouts
    from dflash_trt.planning.slo import choose, parse_slo

    tpot, node = parse_slo(args.slo), settings.gpu.gpus_per_node
    found, sources = [], []
    for text in precisions(args, inventory, settings):
        setting = replace(settings, precision=parse_precision(text))
        models = model_layouts(inventory, setting, name=name, context=context)
        layouts, source = best_layouts(models, args.engine, name, stored=text is None)
        best = choose(layouts, acceptance, blocks=blocks, tpot=tpot, node=node, precision=text)
        found.append((text, best))
        sources.append(source)
    return found, "; ".join(dict.fromkeys(sources))


def answer(
    args: argparse.Namespace,
    found: Sequence[tuple[str | None, Choice | None]],
    *,
    target: str,
    gpu: str | None,
    place: str,
    times: str,
    acceptance: Acceptance,
    context: int,
    unit: str,
) -> int:
    """Print the plan: the first precision in which a setting is fast enough. Exit code 1 if there is none."""
    from dflash_trt.planning.slo import Plan, parse_slo

    chosen = next((choice for _, choice in found if choice is not None), None)
    if args.json:
        plan = chosen and Plan(
            target=target,
            drafter=args.drafter,
            engine=args.engine,
            gpu=gpu,
            tpot=parse_slo(args.slo),
            context=context,
            times=times,
            acceptance=acceptance.source,
            choice=chosen,
        )
        print_json(plan and plan.to_dict())
        return 0 if plan else 1
    print_text(f"{target} on {place}, {context} tokens of context; a model, not a measured setting")
    print_text(f"times: {times}")
    print_text(f"acceptance: {acceptance.source}")
    rows = [("precision", "layout", "batch", "tokens/s per user", f"per {unit}", "users on a node")]
    for text, choice in found:
        if choice is None:
            rows.append((text or "as stored", "none is that fast", "", "", "", ""))
            continue
        layout = f"{choice.gpus} {unit}{'s' if choice.gpus > 1 else ''}"
        speeds = f"{choice.speed:.0f}", f"{choice.throughput:.0f}"
        rows.append((text or "as stored", layout, str(choice.batch), *speeds, str(choice.users)))
    print_table(rows)
    if chosen is None:
        print_text(f"no setting keeps --slo {args.slo}")
        return 1
    steps = (f"{block if block > 1 else 'plain'} up to {n}" for n, block in chosen.schedule)
    print_text(f"chosen: {chosen.precision or 'as stored'}, the first precision that is fast enough")
    print_text(f"block length by active requests: {', '.join(steps)}")
    print_text("to build it: add --json > plan.json, then `dflash-trt build --from-plan plan.json`")
    return 0
