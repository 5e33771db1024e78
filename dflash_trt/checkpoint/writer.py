"""Write safetensors files in pieces: first the header, then the bytes of each tensor at its place."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.tensors import DTYPES
from dflash_trt.files.disk import whole_file

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write. `pieces` yields its data in order, and may yield data of other entries, by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[tuple[str, NDArray[Any]]] = field(default=())


def write_shard(path: Path, entries: Sequence[Entry]) -> None:
    """Write `path`. The file appears once it is complete and on disk.

    Raises ValueError if the pieces do not have the sizes of the entries.
    """
    header, end, starts = {}, 0, {}
    for entry in _aligned_first(entries):
        size = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + size],
        }
        starts[entry.name], end = end, end + size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
        position = dict(starts)
        for name, data in _pieces(entries):
            file.seek(8 + len(text) + position[name])
            file.write(np.ascontiguousarray(data).tobytes())
            position[name] += data.nbytes
        for name, said in header.items():
            if position[name] != said["data_offsets"][1]:
                raise ValueError(f"{path}: {name} got {position[name] - starts[name]} bytes, header: {said}")


def _aligned_first(entries: Sequence[Entry]) -> list[Entry]:
    """Wide types before narrow ones, so that every tensor starts at a multiple of its item size.

    Weights and their scales are separate. So layers that are multiplied as one stay adjacent, if their entries are.
    """
    return sorted(
        entries, key=lambda e: (-DTYPES[e.dtype].itemsize, e.dtype, e.name.rpartition(".")[2] != "weight")
    )


def _pieces(entries: Sequence[Entry]) -> Iterator[tuple[str, NDArray[Any]]]:
    for entry in entries:
        yield from entry.pieces
