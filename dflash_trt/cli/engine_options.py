"""Options of the command line that belong to an engine: added, read and refused as its options class says."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, fields
from typing import Any

from dflash_trt.cli.options import at_least
from dflash_trt.engines import registry
from dflash_trt.engines.base import EngineOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for kind, engines in registry.names_by_options().items():
        group = parser.add_argument_group(
            kind.title, f"with --engine {' or '.join(engines)}, and --max-batch-size (default: {kind.batch})"
        )
        for field in _fields(kind):
            _add(group, field)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that a memory plan depends on."""
    for kind, engines in registry.names_by_options().items():
        for field in _fields(kind, plan=True):
            _add(parser, field, note=f"with {' or '.join(engines)}; ")


def from_arguments(args: argparse.Namespace, *, plan: bool = False) -> EngineOptions | None:
    """The options of the engine that was asked for; None where it has none.

    Ends the program, as for wrong usage, where an option is given that belongs to another engine, or one is missing.
    """
    kind = registry.find(args.engine).options
    for other, engines in registry.names_by_options().items():
        flags = [f.metadata["flag"] for f in _fields(other, plan=plan) if getattr(args, f.name) is not None]
        if other is not kind and flags:
            args.usage_error(f"{', '.join(flags)}: only with --engine {' or '.join(engines)}")
    if kind is None:
        return None
    given = {f.name: value for f in fields(kind) if (value := getattr(args, f.name, None)) is not None}
    for field in _fields(kind):
        if field.default is MISSING and field.default_factory is MISSING and field.name not in given:
            args.usage_error(f"--engine {args.engine} needs {field.metadata['flag']}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _fields(kind: type[EngineOptions], *, plan: bool = False) -> list[Field[Any]]:
    """The fields that are options of `build`, or of `plan`."""
    options = [field for field in fields(kind) if field.metadata]
    return [field for field in options if field.metadata["plan"] or not plan]


def _add(parser: Any, field: Field[Any], note: str = "") -> None:
    """`parser` may be a group."""
    said = field.metadata
    arguments = {**said["arguments"], "help": note + said["arguments"]["help"]}
    if said["least"] is not None:
        arguments["type"] = at_least(said["least"])
    parser.add_argument(said["flag"], dest=field.name, **arguments)
