"""Options of the command line, declared where their values are held: as fields of a dataclass."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

YEARS = "3e8"  # the most seconds of an option, ten years


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field as an option.

    help, metavar: as argparse shows them. least, most: of numbers; `most` as errors show it. parse: reads a text, where
    the type alone does not say how. kind: the field's type without None. default: MISSING if the option is required.
    """

    help: str
    metavar: str | None
    flag: str
    least: int | None
    most: str
    parse: Callable[[str], Any] | None
    name: str
    kind: Any
    default: Any


def option(
    help: str,
    metavar: str | None = None,
    *,
    flag: str = "",
    least: int | None = None,
    most: str = "",
    parse: Callable[[str], Any] | None = None,
    **default: Any,
) -> Any:
    """A field that is an option; see `Option`. `flag`: by default the field's name. `default`: as `field` takes it."""
    declared = {"help": help, "metavar": metavar, "flag": flag, "least": least, "most": most, "parse": parse}
    return field(metadata=declared, **default)


def options_of(settings: type) -> list[Option]:
    """The options among the fields of a dataclass, in their order, without those of its bases."""
    types, found = inspect.get_annotations(settings), []
    options = {f.name: f for f in fields(settings) if f.metadata and f.name in types}
    # Those of the other fields may need imports.
    annotations = SimpleNamespace(__annotations__={name: types[name] for name in options})
    kinds = get_type_hints(annotations, vars(sys.modules[settings.__module__]))
    for name, f in options.items():
        kind, declared = kinds[name], dict[str, Any](f.metadata)
        declared["flag"] = declared["flag"] or f"--{name.replace('_', '-')}"
        if get_origin(kind) in (Union, UnionType):
            (kind,) = (part for part in get_args(kind) if part is not NoneType)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        found.append(Option(**declared, name=name, kind=kind, default=default))
    return found
