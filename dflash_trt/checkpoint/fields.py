"""Typed access to the JSON of strangers. Errors name file, field and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dflash_trt.errors import CheckpointError, quoted, show, show_name
from dflash_trt.files.reading import CONFIG_BYTES, read_config

LARGEST_INTEGER = 2**31 - 1
_SMALLEST, _LARGEST = 1e-30, 1e12
T = TypeVar("T")


class Fields:
    """Typed access to one JSON object of a file. Null counts as absent, because Transformers writes it so."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    @classmethod
    def read(cls, path: Path, limit: int = CONFIG_BYTES) -> Fields:
        """Those of the JSON object in a file of at most `limit` bytes."""
        return cls(path, read_config(path, limit))

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error that a value in this place is wrong."""
        return CheckpointError(f"{self.path}: {show_name(self.prefix + key)} {problem}")

    def wrong(self, key: str, problem: str) -> CheckpointError:
        """The same, with the value before the problem."""
        return self.error(key, f"is {show(self.get(key))}, {problem}")

    def get(self, key: str) -> Any:
        """The value as it is; None where it is absent."""
        return self.values.get(key)

    def section(self, key: str) -> Fields | None:
        """The object in this field; None where it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "expected an object")
        return Fields(self.path, value, f"{self.prefix}{key}.")

    def needed(self, key: str, content: str) -> Fields:
        """The object in this field, which must be there. `content`: what it should be, for the error."""
        section = self.section(key)
        if section is None:
            raise self.error(key, f"is missing, expected {content}")
        return section

    def integer(
        self, key: str, *, minimum: int = 1, maximum: int = LARGEST_INTEGER, default: int | None = None
    ) -> int:
        """An integer from `minimum` to `maximum`. Without a default, the field must be there."""
        value = self._present(key, default, "an integer")
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.wrong(key, f"expected an integer from {minimum} to {maximum}")
        return value

    def number(
        self, key: str, *, above: float = 0.0, minimum: float | None = None, default: float | None = None
    ) -> float:
        """A number greater than `above`, or at least `minimum` if that is given.

        float32 must be able to compute with it, so it is 0 or has a magnitude from 1e-30 to 1e12.
        """
        value = self._present(key, default, "a number")
        bound = f"greater than {above:g}" if minimum is None else f"of at least {minimum:g}"
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or (number <= above if minimum is None else number < minimum):
            raise self.wrong(key, f"expected a number {bound}")
        if number and not _SMALLEST <= abs(number) <= _LARGEST:
            raise self.wrong(key, f"expected a magnitude from {_SMALLEST:g} to {_LARGEST:g}")
        return number

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """True or false. Without a default, the field must be there."""
        value = self._present(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "expected true or false")
        return value

    def string(self, key: str, among: Collection[str] | None = None) -> str:
        """A text, which must be there. `among`: the texts that it may be; None: any."""
        value = self._present(key, None, "a string")
        if not isinstance(value, str):
            raise self.wrong(key, "expected a string")
        if among is not None and value not in among:
            raise self.error(key, f"is {quoted(value)}, supported are: {', '.join(among)}")
        return value

    def strings(self, key: str, *, most: int, among: Collection[str] | None = None) -> tuple[str, ...]:
        return tuple(item.string(place, among) for place, item in self._items(key, "strings", most))

    def integers(
        self, key: str, *, most: int, minimum: int = 0, maximum: int = LARGEST_INTEGER
    ) -> tuple[int, ...]:
        items = self._items(key, "integers", most)
        return tuple(item.integer(place, minimum=minimum, maximum=maximum) for place, item in items)

    def _items(self, key: str, what: str, most: int) -> list[tuple[str, Fields]]:
        value = self._present(key, None, f"a list of {what}")
        if not isinstance(value, list):
            raise self.wrong(key, f"expected a list of {what}")
        if len(value) > most:
            raise self.error(key, f"has {len(value)} entries, expected at most {most}")
        places = [f"{key}[{index}]" for index in range(len(value))]
        item = Fields(self.path, dict(zip(places, value, strict=True)), self.prefix)
        return [(place, item) for place in places]

    def _present(self, key: str, default: object, expected: str) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise self.error(key, f"is missing, expected {expected}")
        return default if value is None else value


def stated(places: Sequence[tuple[Fields, str]], read: Callable[[Fields, str], T]) -> T | None:
    """What `read(fields, key)` gives for a field that may be in several places, which must agree; None if it is absent.

    Raises CheckpointError as `read` does, and where two places disagree.
    """
    present = [(fields, key) for fields, key in places if fields.get(key) is not None]
    values = [read(fields, key) for fields, key in present]
    if any(value != values[0] for value in values):
        (fields, key), (other, name) = present[0], present[-1]
        raise fields.wrong(key, f"but {other.prefix}{name} is {show(other.get(name))}")
    return values[0] if values else None
