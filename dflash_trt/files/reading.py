"""Read the files of strangers: regular files only, of limited size, with strict JSON parsed in linear time.

Errors are CheckpointError unless the caller names another class.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from dflash_trt.errors import CheckpointError, DFlashError, quoted, show_name

# Parsed JSON takes up to 25 times the memory of its text.
CONFIG_BYTES = 16 << 20
_MOST_NESTED = 64
_POINTER = b"version https://git-lfs.github.com/"

Kind = type[DFlashError]


def open_file(path: Path, kind: Kind = CheckpointError) -> BinaryIO:
    """Open a regular file for reading. A pipe or a device of that name is refused without waiting for it."""
    try:
        file = open(  # noqa: SIM115 - the caller closes it
            path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        )
    except FileNotFoundError:
        raise kind(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise kind(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise kind(f"{path}: is a pipe or a device, expected a regular file")
    if file.peek(len(_POINTER))[: len(_POINTER)] == _POINTER:
        file.close()
        raise kind(f"{path}: is a Git-LFS pointer, not the file itself; run `git lfs pull` in its directory")
    return file


def read_file(path: Path, limit: int, kind: Kind = CheckpointError) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    with open_file(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = b"" if size > limit else file.read(limit + 1)
        except OSError as error:
            raise kind(f"{path}: cannot be read ({error.strerror})") from None
    if max(size, len(content)) > limit:
        raise kind(f"{path}: {max(size, len(content))} bytes, but this file may have at most {limit}")
    return content


def read_text(path: Path, limit: int, kind: Kind = CheckpointError) -> str:
    """The content of a regular file of UTF-8 text, of at most `limit` bytes."""
    try:
        return read_file(path, limit, kind).decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not UTF-8 (byte {error.start} is {error.object[error.start]:#04x})") from None


def read_object(path: Path, limit: int = CONFIG_BYTES, kind: Kind = CheckpointError) -> dict[str, Any]:
    """The JSON object in a regular file of at most `limit` bytes."""
    return parse_object(read_file(path, limit, kind), str(path), kind)


def read_config(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """The object in a model's configuration, which may have NaN and infinities, as Python's json writes them."""
    return parse_object(read_file(path, limit), str(path), finite=False)


def parse_object(
    text: bytes | str, label: str, kind: Kind = CheckpointError, *, finite: bool = True
) -> dict[str, Any]:
    """Parse one JSON object. Every error starts with `label`.

    Refused: a duplicate key in one object, nesting deeper than 64, and with `finite` NaN and infinities.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise kind(f"{label}: the key {quoted(twice)} appears more than once in one object")
        return values

    def decimal(number: str) -> float:
        value = float(number)
        if math.isinf(value):
            refused(number)
        return value

    def refused(number: str) -> NoReturn:
        raise kind(f"{label}: {show_name(number)} is not JSON; JSON numbers are finite")

    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        constant = refused if finite else float
        values = json.loads(decoded, object_pairs_hook=unique, parse_float=decimal, parse_constant=constant)
    except RecursionError:
        raise kind(f"{label}: nested deeper than the {_MOST_NESTED} levels allowed") from None
    except ValueError as error:
        raise kind(f"{label}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise kind(f"{label}: holds a JSON {type(values).__name__}, expected an object")
    if _deeper(values, _MOST_NESTED):
        raise kind(f"{label}: nested deeper than the {_MOST_NESTED} levels allowed")
    return values


def _deeper(value: object, most: int) -> bool:
    """Whether lists and objects are nested deeper than `most`. A loop, because recursion has its own limit."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)  # type: ignore[attr-defined]
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
