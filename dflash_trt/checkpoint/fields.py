"""JSON from strangers: bounded, strict parsing and typed access whose errors name file, field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dflash_trt.errors import CheckpointError

_LARGEST_INTEGER = 2**31 - 1


def parse_object(text: bytes, label: str) -> dict[str, Any]:
    """Parse one JSON object, refusing duplicate keys, NaN and infinities. `label` opens every error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in values if names.count(name) > 1)
            raise CheckpointError(f"{label}: the key {twice!r} appears more than once in one object")
        return values

    def constant(name: str) -> NoReturn:
        raise CheckpointError(f"{label}: {name} is not JSON")

    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{label}: holds a JSON {type(values).__name__}, expected an object")
    return values


def read_object(path: Path, limit: int = 16 << 20) -> dict[str, Any]:
    """Read a JSON object from a file of at most `limit` bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: {size} bytes, more than the {limit} allowed for this file")
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint directory must have one") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_object(text, str(path))


class Fields:
    """Typed access to one JSON object of a file. Null counts as absent, as Transformers writes it."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def error(self, key: str, problem: str) -> CheckpointError:
        place = f"{self.prefix}{key}"  # holds names from the file, which may carry control characters
        return CheckpointError(f"{self.path}: {place if place.isprintable() else ascii(place)} {problem}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def section(self, key: str) -> Fields | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"is {show(value)}, expected an object")
        return Fields(self.path, value, f"{self.prefix}{key}.")

    def integer(
        self, key: str, *, minimum: int = 1, maximum: int = _LARGEST_INTEGER, default: int | None = None
    ) -> int:
        value = self._present(key, default, "an integer")
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.error(key, f"is {show(value)}, expected an integer from {minimum} to {maximum}")
        return value

    def number(
        self, key: str, *, above: float = 0.0, minimum: float | None = None, default: float | None = None
    ) -> float:
        """A finite number greater than `above`, or at least `minimum` when that is given."""
        value = self._present(key, default, "a number")
        bound = f"greater than {above:g}" if minimum is None else f"of at least {minimum:g}"
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or (number <= above if minimum is None else number < minimum):
            raise self.error(key, f"is {show(value)}, expected a number {bound}")
        return number

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        value = self._present(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"is {show(value)}, expected true or false")
        return value

    def string(self, key: str) -> str:
        value = self._present(key, None, "a string")
        if not isinstance(value, str):
            raise self.error(key, f"is {show(value)}, expected a string")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        return tuple(item.string(name) for name, item in self._items(key, "strings"))

    def integers(self, key: str, *, minimum: int = 0, maximum: int = _LARGEST_INTEGER) -> tuple[int, ...]:
        items = self._items(key, "integers")
        return tuple(item.integer(name, minimum=minimum, maximum=maximum) for name, item in items)

    def _items(self, key: str, what: str) -> list[tuple[str, Fields]]:
        value = self._present(key, None, f"a list of {what}")
        if not isinstance(value, list):
            raise self.error(key, f"is {show(value)}, expected a list of {what}")
        names = [f"{key}[{index}]" for index in range(len(value))]
        each = Fields(self.path, dict(zip(names, value, strict=True)), self.prefix)
        return [(name, each) for name in names]

    def _present(self, key: str, default: object, expected: str) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise self.error(key, f"is missing, expected {expected}")
        return default if value is None else value


def show(value: object) -> str:
    """A value as JSON, cut to a length that fits an error message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
