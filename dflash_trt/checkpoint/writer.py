"""Write checkpoints: safetensors files in pieces, their index, config.json and the files beside them; and those made of
other files, which a cache keeps: DFLASH_TRT_CACHE, by default ~/.cache/dflash-trt.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.manifest import digest
from dflash_trt.checkpoint.quantization import QUANT_CONFIG
from dflash_trt.checkpoint.tensors import DTYPES, INDEX, SINGLE
from dflash_trt.files.disk import cached_in, own_file, temporary_folder, whole_file, write_object

RECORD = "converted.json"  # in a checkpoint made of other files
_ALIGNMENT = 64
_BESIDE = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation settings


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write. `pieces` yields its data in order, and may yield data of other entries, by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[tuple[str, NDArray[Any]]] = field(default=())


def write_checkpoint(
    source: Path, out: Path, shards: Iterable[tuple[str, Sequence[Entry]]], config: Mapping[str, Any]
) -> None:
    """Write a checkpoint to `out`: files of tensors by name, `config` as config.json, other files as in `source`.

    The index is made anew from the tensors.
    """
    weight_map: dict[str, str] = {}
    for name, entries in shards:
        weight_map |= dict.fromkeys((entry.name for entry in entries), name)
        if entries:
            write_shard(out / name, entries)
    if set(weight_map.values()) != {SINGLE}:
        size = sum((out / name).stat().st_size for name in set(weight_map.values()))
        write_object(out / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    copy_beside(source, out)
    write_object(out / "config.json", config)


def copy_beside(source: Path, out: Path) -> None:
    """Copy the files of a checkpoint that are neither tensors nor about them."""
    for path in source.iterdir():
        if path.suffix in _BESIDE and path.name not in ("config.json", QUANT_CONFIG, INDEX):
            shutil.copyfile(own_file(source, path), out / path.name)


def write_shard(path: Path, entries: Sequence[Entry]) -> None:
    """Write `path`. The file appears once it is complete and on disk.

    Raises ValueError if the pieces do not have the sizes of the entries.
    """
    header, end, starts = {}, 0, {}
    # Wide types before narrow ones, so that every tensor starts at a multiple of its item size. Weights and their
    # scales are separate, so layers that are multiplied as one stay adjacent, if their entries are.
    for entry in sorted(
        entries, key=lambda e: (-DTYPES[e.dtype].itemsize, e.dtype, e.name.rpartition(".")[2] != "weight")
    ):
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
        for name, data in chain.from_iterable(entry.pieces for entry in entries):
            file.seek(8 + len(text) + position[name])
            file.write(np.ascontiguousarray(data).tobytes())
            position[name] += data.nbytes
        for name, form in header.items():
            if position[name] != form["data_offsets"][1]:
                raise ValueError(f"{path}: {name} got {position[name] - starts[name]} bytes, header: {form}")


def converted(place: Path, sha256: str, convert: Callable[[Path], Mapping[str, Any]]) -> Path:
    """`place` in the cache, made on first use by `convert`, which fills a directory and returns what to record.

    sha256: of what is converted. The conversion is reused if all its files have their recorded digests.
    """
    if _whole(place, sha256):
        return place
    with ExitStack() as stack:
        with cached_in(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(temporary_folder(prefix=f".{place.name}.", dir=place.parent))
        record = convert(work)
        digests = {path.name: digest(path) for path in sorted(work.iterdir())}
        write_object(work / RECORD, {**record, "sha256": sha256, "files": digests})
        if not _whole(place, sha256):  # another process may have been faster
            shutil.rmtree(place, ignore_errors=True)
            work.rename(place)
    return place


def _whole(place: Path, sha256: str) -> bool:
    """Whether `place` holds the complete, unaltered conversion of what has this digest."""
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
        return bool(record["sha256"] == sha256) and all(
            digest(place / name) == expected for name, expected in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
