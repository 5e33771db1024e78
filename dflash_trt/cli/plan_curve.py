"""`dflash-trt plan --curve`: throughput per GPU against tokens per second and user."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_trt.cli import plan_slo
from dflash_trt.cli.options import at_least, each
from dflash_trt.cli.output import print_json, print_table, print_text

if TYPE_CHECKING:
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.planning.acceptance import Acceptance, Chain
    from dflash_trt.planning.curve import Curves, Point
    from dflash_trt.planning.memory import Settings

# Speeds per user, relative to the fastest plain decoding.
_SPEEDS = (0.25, 0.5, 0.7, 0.8, 0.85, 0.9, 1.0, 1.5, 2.0)
# Options of the memory plan that the curves vary themselves, with their defaults.
_FIXED = {"tensor_parallel": 1, "max_seq_len": None, "max_batch_size": 8}
_ONLY = ("context", "acceptance", "blocks", "steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "times", "with --curve, --speed or --slo, from a model of a pass's time"
    )
    group.add_argument(
        "--curve",
        action="store_true",
        help="show the throughput at each speed per user, over layouts and batches of one node",
    )
    group.add_argument(
        "--speed",
        type=float,
        metavar="R",
        help="show how many users one node serves at R tokens per second each, and with which settings",
    )
    group.add_argument(
        "--slo",
        metavar="tpot=MS",
        help="choose precision, layout, batch and block lengths for MS milliseconds per output token; --json prints "
        "the plan that `build --from-plan` takes",
    )
    group.add_argument(
        "--context", type=at_least(1), metavar="N", help="rows of cache behind each request (default: 2048)"
    )
    group.add_argument(
        "--acceptance",
        metavar="TABLE",
        help="tokens per round by block length, such as 4=3.1,8=4.1, or a report of `train evaluate --json` (default: "
        "the published ones of the pair)",
    )
    group.add_argument(
        "--blocks",
        type=each(at_least(2)),
        metavar="K,...",
        help="block lengths (default: up to the trained one)",
    )
    group.add_argument(
        "--steps",
        type=Path,
        metavar="FILE",
        help="take the times from a file that `bench --steps` wrote; its pair, engine and machine are planned for",
    )


def asked(args: argparse.Namespace) -> bool:
    """Whether times were asked for. Ends the program if their options are used without."""
    wanted = bool(args.curve or args.speed is not None or args.slo is not None)
    if args.slo is not None and (args.curve or args.speed is not None or args.svg):
        args.usage_error("--slo: not with --curve, --speed or --svg")
    if given := [f"--{name}" for name in _ONLY if getattr(args, name) is not None and not wanted]:
        args.usage_error(f"{', '.join(given)}: only with --curve, --speed or --slo")
    if wanted and (fixed := [name for name in _FIXED if getattr(args, name) not in (None, _FIXED[name])]):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in fixed).replace(
            "--tensor-parallel", "--tp"
        )
        args.usage_error(
            f"{flags}: not with --curve, --speed or --slo, which compare layouts and batches (--context: length)"
        )
    if args.speed is not None and not args.speed > 0:
        args.usage_error(f"--speed {args.speed:g} is not above 0")
    return wanted


def run(args: argparse.Namespace, inventory: Inventory, settings: Settings) -> int:
    """With the model's times."""
    from dflash_trt.checkpoint.catalogue import known_pair
    from dflash_trt.planning.curve import compute_curves
    from dflash_trt.planning.layouts import model_layouts
    from dflash_trt.planning.operators import best_layouts
    from dflash_trt.planning.serving import USUAL_CONTEXT

    pair = known_pair(args.target)
    name = Path(args.target).name if pair is None else pair.name
    acceptance, chain = _acceptance(args, name)
    context, blocks = args.context or USUAL_CONTEXT, _blocks(args, inventory.drafter.block_size)
    gpu = settings.gpu
    if args.slo is not None:
        found, source = plan_slo.choices(
            args, inventory, settings, acceptance, blocks, name=name, context=context
        )
        return plan_slo.answer(
            args,
            found,
            target=args.target if pair is None else name,
            gpu=gpu.name,
            place=gpu.name,
            times=source,
            acceptance=acceptance,
            context=context,
            unit="GPU",
        )
    models = model_layouts(inventory, settings, name=name, context=context)
    layouts, source = best_layouts(models, args.engine, name, stored=args.precision is None)
    curves = compute_curves(
        layouts,
        acceptance,
        name=name,
        place=gpu.name,
        times=source,
        context=context,
        blocks=blocks,
        chain=chain,
    )
    return _show(args, curves, gpu.gpus_per_node)


def run_steps(args: argparse.Namespace) -> int:
    """With the times of a steps file. Its machine is the node."""
    from dflash_trt.planning.curve import compute_curves
    from dflash_trt.planning.serving import USUAL_CONTEXT
    from dflash_trt.planning.slo import choose, parse_slo
    from dflash_trt.planning.steps import read_steps

    steps = read_steps(args.steps)
    if args.target is not None:
        steps.check_target(args.target)
    if args.gpu is not None:
        steps.check_gpu(args.gpu)
    engine = steps.bundle["engine"]
    if args.engine not in (None, engine):
        args.usage_error(f"--engine {args.engine}: {args.steps} was measured with {engine}")
    given = [f"--{name}" for name in ("drafter", "precision") if getattr(args, name) is not None]
    if given:
        args.usage_error(f"{', '.join(given)}: not with --steps, which are of one bundle")
    args.engine = engine
    name, context = steps.known or steps.name, args.context or min(USUAL_CONTEXT, steps.contexts[1])
    acceptance, _ = _acceptance(args, name)
    layout = steps.layout(context)
    blocks = _blocks(args, steps.block_size) if steps.plain else [steps.block_size]
    source = f"passes measured with {engine}: {args.steps.name}"
    unit = "GPU" if steps.machine["gpus"] else "machine"
    if args.slo is not None:
        best = choose(
            [layout],
            acceptance,
            blocks=blocks,
            tpot=parse_slo(args.slo),
            node=layout.gpus,
            precision=steps.precision,
        )
        return plan_slo.answer(
            args,
            [(steps.precision, best)],
            target=steps.known or args.target or name,
            gpu=steps.gpu,
            place=steps.place,
            times=source,
            acceptance=acceptance,
            context=context,
            unit=unit,
        )
    curves = compute_curves(
        [layout],
        acceptance,
        name=name,
        place=steps.place,
        times=source,
        unit=unit,
        context=context,
        blocks=blocks,
    )
    return _show(args, curves, layout.gpus)


def _acceptance(args: argparse.Namespace, name: str) -> tuple[Acceptance, Chain | None]:
    from dflash_trt.errors import UsageError
    from dflash_trt.planning.acceptance import parse, published

    acceptance, chain = published(name)
    if args.acceptance is not None:
        acceptance = parse(args.acceptance)
    if acceptance is None:
        raise UsageError(
            f"no acceptance length of {name} is published: give --acceptance, such as 4=3.1,8=4.1, or a report "
            "of `dflash-trt train evaluate --json`"
        )
    return acceptance, chain


def _blocks(args: argparse.Namespace, trained: int) -> Sequence[int]:
    from dflash_trt.planning.serving import lengths

    blocks: Sequence[int] = args.blocks or lengths(trained)
    if longest := [block for block in blocks if block > trained]:
        args.usage_error(f"--blocks {longest[0]}: the drafter was trained for blocks of {trained}")
    return blocks


def _show(args: argparse.Namespace, curves: Curves, node: int) -> int:
    if args.svg:
        from dflash_trt.reports.charts import curve_chart

        args.svg.write_text(curve_chart(**chart(curves)), encoding="utf-8")
        print(f"drew {args.svg}", file=sys.stderr)
    if args.speed is not None:
        return _print_speed(curves, args.speed, node, as_json=args.json)
    if args.json:
        print_json(curves.to_dict())
    else:
        _print(curves)
    return 0


def chart(curves: Curves) -> dict[str, Any]:
    """The arguments of curve_chart: a line for plain decoding, for the best blocks, and for EAGLE-3."""
    from dflash_trt.planning.curve import CHAIN, PLAIN

    def line(method: str) -> list[tuple[float, float]]:
        return [(point.speed, point.throughput) for point in curves.frontier(method)]

    lines = {name: line(name) for name in (PLAIN, CHAIN, *curves.blocks) if name in curves.points}
    return {
        "series": lines,
        "title": f"{curves.target} on {curves.place}, {curves.context} tokens of context (model)",
        "x": "tokens per second of one user",
        "y": f"tokens per second of one {curves.unit}",
    }


def _print(curves: Curves) -> None:
    from dflash_trt.planning.curve import CHAIN, PLAIN

    _print_sources(curves)
    if PLAIN in curves.points:
        fastest = curves.fastest(PLAIN)
        print_text(
            f"plain decoding reaches {fastest.speed:.0f} tokens/s per user, at batch {fastest.batch} on "
            f"{_count(fastest.gpus, curves.unit)}"
        )
    print(f"\ntokens/s per {curves.unit} at the same speed per user:")
    chain = [CHAIN] if curves.chain else []
    rows = [("per user", "plain", "batch", "drafted", "block", "batch", "ratio", *chain)]
    for share in _SPEEDS:
        speed = share * curves.top_speed
        plain, block = curves.best(PLAIN, speed * 0.999), curves.best_block(speed * 0.999)
        row = [
            f"{speed:.0f} ({share:.0%})",
            *_cells(plain, curves.unit),
            *_cells(block, curves.unit, drafted=True),
            _ratio(block, plain),
        ]
        if curves.chain:
            row.append(_ratio(curves.best(CHAIN, speed * 0.999), plain))
        rows.append(tuple(row))
    print_table(rows)
    if PLAIN not in curves.points:
        return
    print("\nspeed per user at the same batch, relative to plain decoding:")
    known = {p.batch for p in curves.points[PLAIN]}
    table = [("batch", *curves.blocks, *([CHAIN] if curves.chain else []))]
    for batch in dict.fromkeys(min(batch, max(known)) for batch in (1, 8, 32, 128)):
        nearest = min(known, key=lambda found: abs(found - batch))
        ratios = [curves.same_batch(name, nearest) for name in table[0][1:]]
        table.append((str(nearest), *(f"{r:.2f}x" if r else "-" for r in ratios)))
    print_table(table)


def _print_speed(curves: Curves, speed: float, node: int, *, as_json: bool) -> int:
    """The settings with the most users at this speed. Exit code 1 if no setting is that fast."""
    from dflash_trt.planning.curve import PLAIN

    plain, block = curves.best(PLAIN, speed), curves.best_block(speed)
    best = max((p for p in (plain, block) if p is not None), key=lambda p: p.throughput, default=None)
    if as_json:
        print_json(
            {
                "speed": speed,
                "users": None if best is None else _users(best, node),
                "plain": None if plain is None else {"users": _users(plain, node), **_settings(plain)},
                "drafted": None if block is None else {"users": _users(block, node), **_settings(block)},
            }
        )
        return 0 if best else 1
    _print_sources(curves)
    for name, point in (("plain", plain), ("with drafts", block)):
        if point is None:
            print(f"{name}: no setting reaches {speed:g} tokens/s per user")
            continue
        length = "" if point.method == PLAIN else f", {point.method}"
        print_text(
            f"{name}: {_users(point, node)} users at {point.speed:.0f} tokens/s on a node of {node}: groups of "
            f"{_count(point.gpus, curves.unit)}, batch {point.batch}{length}"
        )
    return 0 if best else 1


def _print_sources(curves: Curves) -> None:
    print_text(
        f"{curves.target} on {curves.place}, {curves.context} tokens of context; a model, not a measured curve"
    )
    print_text(f"times: {curves.times}")
    print_text(f"acceptance: {curves.acceptance.source}")
    if curves.chain is not None:
        print_text(f"EAGLE-3: {curves.chain.length:g} tokens a round, {curves.chain.source}")


def _settings(point: Point) -> dict[str, Any]:
    return {
        "method": point.method,
        "gpus": point.gpus,
        "batch": point.batch,
        "tokens_per_second": point.speed,
    }


def _users(point: Point, node: int) -> int:
    return point.batch * (node // point.gpus)


def _cells(point: Point | None, unit: str, *, drafted: bool = False) -> tuple[str, ...]:
    """Tokens per second of a unit, the block length if it drafts, and the batch."""
    if point is None:
        return ("-", *([""] if drafted else []), "")
    block = [point.method.removeprefix("block ")] if drafted else []
    return f"{point.throughput:.0f}", *block, f"{point.batch} on {_count(point.gpus, unit)}"


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' if number > 1 else ''}"


def _ratio(point: Point | None, plain: Point | None) -> str:
    if point is None:
        return "-"
    return "only" if plain is None else f"{point.throughput / plain.throughput:.1f}x"
