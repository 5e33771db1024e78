"""A quantized checkpoint with its weights as one engine reads them: the same numbers, laid out otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.quantization import QUANT_CONFIG
from dflash_trt.checkpoint.tensors import Checkpoint, TensorInfo
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.files.disk import own_file
from dflash_trt.files.reading import read_object
from dflash_trt.formats import FORMATS, INT4, NumberFormat
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.formats.numbers import pack_pairs, unpack_rows
from dflash_trt.quantization.convert import STEP_BYTES, joined_name, write_json

# The tensors that stand in for one of the checkpoint; None where it stays as it is.
Repack = Callable[[TensorInfo], list[Entry] | None]


def int4_by_row(checkpoint: Checkpoint, out: Path, progress: Progress) -> Path:
    """Write the checkpoint with its INT4 weights by row, two columns per byte, as ONNX and TensorRT read them."""

    def repacked(info: TensorInfo) -> list[Entry] | None:
        form, part = _stored(checkpoint, info)
        if form is None or form.name != INT4.name or part != "weight":
            return None
        pieces = (
            (info.name, pack_pairs(unpack_rows(rows))) for rows in steps(checkpoint, info, info.shape[1])
        )
        return [Entry(info.name, "U8", (2 * info.shape[0], info.shape[1] // 2), pieces)]

    return rewritten(checkpoint, out, repacked, progress)


def in_blocks(checkpoint: Checkpoint, out: Path, progress: Progress, *, eight_bits: bool = False) -> Path:
    """Write the checkpoint with its layers of integers in blocks, as ONNX Runtime multiplies them.

    Layers of one input lie one after the other. Experts stay as they are. With `eight_bits` numbers of four bits take
    eight.
    """

    def repacked(info: TensorInfo) -> list[Entry] | None:
        form, part = _stored(checkpoint, info)
        if form is None or form.integer_bits is None or ".experts." in info.name or part == "":
            return None
        if part != "weight":
            return []
        return _blocks(checkpoint, info, form, eight_bits)

    return rewritten(checkpoint, out, repacked, progress)


def has_blocks(checkpoint: Checkpoint) -> bool:
    """Whether `in_blocks` would change anything."""
    found = (
        _stored(checkpoint, info)[0] for info in checkpoint.tensors.values() if ".experts." not in info.name
    )
    return any(form is not None and form.integer_bits is not None for form in found)


def _stored(checkpoint: Checkpoint, info: TensorInfo) -> tuple[NumberFormat | None, str]:
    """The format of the quantized layer that a tensor is part of, and which part: weight, weight_scale or none."""
    layer, _, part = info.name.rpartition(".")
    weight = checkpoint.tensors.get(f"{layer}.weight")
    algorithm = checkpoint.quantization.algorithm(layer)
    if algorithm is None or weight is None or weight.dtype in FLOAT_DTYPES:
        return None, ""
    return FORMATS[algorithm.scheme], part if part in ("weight", "weight_scale") else ""


def _blocks(checkpoint: Checkpoint, info: TensorInfo, form: NumberFormat, eight_bits: bool) -> list[Entry]:
    name = info.name
    scales = checkpoint.array(f"{name}_scale")
    rows, by_row = len(scales), info.shape[0] == len(scales)
    together = rows // info.shape[0]  # rows that share bytes
    bits = 8 if eight_bits else form.integer_bits
    assert bits is not None

    def pieces() -> Iterator[tuple[str, NDArray[Any]]]:
        done = 0
        for codes in steps(checkpoint, info, 4 * info.shape[1] * together):
            some = scales[done : done + len(codes) * together]
            done += len(some)
            numbers, factors = form.integers(codes, some, by_row=by_row)
            unsigned = (numbers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
            yield name, unsigned if bits == 8 else pack_pairs(unsigned)
            yield f"{name}_scale", factors

    numbers_in_row = info.shape[1] * form.numbers_in_byte // together
    forms = form.block_forms(rows, numbers_in_row)
    first, second = (
        Entry(f"{name.removesuffix('weight')}{suffix}", each.dtypes[0], each.shapes[-eight_bits], given)
        for (suffix, each), given in zip(forms.items(), (pieces(), ()), strict=True)
    )
    return [first, second]


def _as_it_is(checkpoint: Checkpoint, info: TensorInfo) -> Entry:
    flat = checkpoint.array(info.name).reshape(-1).view(np.uint8)
    places = range(0, len(flat), STEP_BYTES)
    return Entry(
        info.name, info.dtype, info.shape, ((info.name, flat[at : at + STEP_BYTES]) for at in places)
    )


def steps(checkpoint: Checkpoint, info: TensorInfo, row_bytes: int) -> Iterator[NDArray[Any]]:
    """Some rows of a tensor at a time."""
    array = checkpoint.array(info.name)
    step = max(1, STEP_BYTES // row_bytes)
    for begin in range(0, len(array), step):
        yield array[begin : begin + step]


def rewritten(checkpoint: Checkpoint, out: Path, repacked: Repack, progress: Progress) -> Path:
    """Write the checkpoint with other tensors in place of some. Shards that are there already stay."""
    out.mkdir(parents=True, exist_ok=True)
    total, done = sum(t.nbytes for t in checkpoint.tensors.values()), 0
    groups: dict[str, list[TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        groups.setdefault(joined_name(info.name.rpartition(".")[0]), []).append(info)
    ordered = [
        info for group in groups.values() for info in sorted(group, key=lambda t: ".q_proj" not in t.name)
    ]
    for file in checkpoint.files:
        tensors = [info for info in ordered if info.file == file]
        if not (out / file.name).is_file():
            progress("repack", done, total)
            entries: list[Entry] = []
            for info in tensors:
                found = repacked(info)
                entries += [_as_it_is(checkpoint, info)] if found is None else found
            write_shard(out / file.name, entries)
        done += sum(info.nbytes for info in tensors)
    progress("repack", total, total)
    for path in checkpoint.directory.glob("*.json"):
        shutil.copyfile(own_file(checkpoint.directory, path), out / path.name)
    if (out / QUANT_CONFIG).is_file():
        config = read_object(out / QUANT_CONFIG)
        if isinstance(config.get("producer"), dict) and config["producer"].pop("sha256", None):
            write_json(out / QUANT_CONFIG, config)  # the weights are other files now
    return out
