"""Options of the command line, declared where the values are held: as annotations of a dataclass's fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

YEARS = "3e8"  # the most seconds of an option, ten years


@dataclass(frozen=True, kw_only=True)
class Option:
    """What `Annotated[int, Option(...)] = 8` says of a field beside its type and default.

    help, metavar: as argparse shows them. flag: by default the field's name. least, most: of numbers; `most` as errors
    show it. parse: reads a text, where the type alone does not say how.
    """

    help: str
    metavar: str | None = None
    flag: str = ""
    least: int | None = None
    most: str = ""
    parse: Callable[[str], Any] | None = None


@dataclass(frozen=True)
class Declared:
    """An option with its field: the name, the type without None, and the default, if `required` is False."""

    name: str
    option: Option
    kind: Any
    default: Any
    required: bool

    @property
    def flag(self) -> str:
        return self.option.flag or f"--{self.name.replace('_', '-')}"


def options_of(settings: type) -> list[Declared]:
    """The options among the fields of a dataclass, in their order, without those of its bases."""
    hints, by_name = get_type_hints(settings, include_extras=True), {f.name: f for f in fields(settings)}
    found = []
    for name in inspect.get_annotations(settings):
        if get_origin(hints[name]) is Annotated:
            kind, option = get_args(hints[name])
            if get_origin(kind) in (Union, UnionType):
                (kind,) = (part for part in get_args(kind) if part is not NoneType)
            field = by_name[name]
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found.append(Declared(name, option, kind, default, default is MISSING))
    return found
