"""A quantized checkpoint as one engine reads it: the same numbers, laid out otherwise or in BF16."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.linears import StoredLinear, quantized_layers, shape_of, stored_linear
from dflash_trt.checkpoint.quantization import QUANT_CONFIG, SECTIONS
from dflash_trt.checkpoint.rules import CACHE_SCALES
from dflash_trt.checkpoint.tensors import DTYPES, Checkpoint, TensorInfo
from dflash_trt.checkpoint.widening import Integers, widened_pieces
from dflash_trt.checkpoint.writer import Entry, write_checkpoint
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_object
from dflash_trt.formats import FORMATS
from dflash_trt.formats.base import BLOCK, Codes
from dflash_trt.formats.numbers import pack_pairs, unpack_rows
from dflash_trt.quantization.convert import STEP_BYTES, as_it_is
from dflash_trt.quantization.layers import multiplied_as_one, of_all_experts

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Pieces = Iterator[tuple[str, NDArray[Any]]]


def int4_by_row(checkpoint: Checkpoint, out: Path, progress: Progress) -> Checkpoint:
    """The checkpoint with its integers in two's complement by row, two columns of INT4 per byte, as ONNX and
    TensorRT read them: written to `out`, unless it has them so already.
    """
    chosen = _stored_layers(checkpoint, lambda _, s: s.in_words or s.in_blocks or not s.by_row)
    apart = _stacks_with_points(checkpoint, chosen)

    def entries(layer: str, stored: StoredLinear) -> list[Entry]:
        if stored.in_words or stored.in_blocks:
            return _signed(checkpoint, layer, stored, points=of_all_experts(layer) in apart)
        info = stored.weight
        rows = _steps(checkpoint, info, info.shape[1])
        pieces = ((info.name, pack_pairs(unpack_rows(some))) for some in rows)
        weight = Entry(info.name, "U8", (2 * info.shape[0], info.shape[1] // 2), pieces)
        return [weight, as_it_is(checkpoint, stored.scale)]

    return _rewritten(checkpoint, chosen, entries, out, progress)


def in_blocks(
    checkpoint: Checkpoint,
    out: Path,
    progress: Progress,
    *,
    eight_bits: bool = False,
    channels: bool = False,
) -> Checkpoint:
    """The checkpoint with its layers of integers in blocks, as ONNX Runtime multiplies them: written to `out`, unless
    it has them so already.

    Layers of one input lie one after the other. Experts stay as they are, except for those in words. With `eight_bits`
    numbers of four bits take eight. With `channels` INT8 layers with one scale for each output stay as they are.
    """

    def others(layer: str, stored: StoredLinear) -> bool:
        """Whether the bytes are not yet those that ONNX Runtime multiplies."""
        if stored.in_words or stored.group_index is not None:
            return True
        if ".experts." in layer or (channels and stored.per_channel):
            return False
        four_bits = stored.in_blocks and stored.weight.shape[2] == BLOCK // 2
        return not stored.in_blocks or (eight_bits and four_bits)

    chosen = _stored_layers(checkpoint, others)
    apart = _stacks_with_points(checkpoint, chosen)

    def entries(layer: str, stored: StoredLinear) -> list[Entry]:
        if not (stored.in_words or stored.in_blocks):
            return _blocks(checkpoint, layer, stored, eight_bits)
        stack = of_all_experts(layer)
        wide = eight_bits and stack == layer
        return _unsigned(checkpoint, layer, stored, eight_bits=wide, points=stack in apart)

    return _rewritten(checkpoint, chosen, entries, out, progress)


def in_bf16(checkpoint: Checkpoint, out: Path, progress: Progress) -> Checkpoint:
    """The checkpoint with its quantized layers widened to BF16, written to `out`.

    Rounding of inputs is left out. Raises CheckpointError where a layer lacks a tensor or has it in another form.
    """

    def entries(layer: str, stored: StoredLinear) -> list[Entry]:
        name, shape = f"{layer}.weight", shape_of(checkpoint, stored.algorithm, layer, stored.weight)
        rows = widened_pieces(checkpoint, stored, STEP_BYTES // (4 * shape[1]))
        return [Entry(name, "BF16", shape, ((name, some.astype(ml_dtypes.bfloat16)) for some in rows))]

    layers, ending = _stored_layers(checkpoint), CACHE_SCALES if checkpoint.quantization.kv_cache else ()
    dropped = {name for name in checkpoint.tensors if name.endswith(ending)}
    dropped |= {info.name for stored in layers.values() for info in stored.tensors}
    return _rewritten(checkpoint, layers, entries, out, progress, dropped=dropped, quantized=False)


def _stored_layers(
    checkpoint: Checkpoint, wanted: Callable[[str, StoredLinear], bool] | None = None
) -> dict[str, StoredLinear]:
    """The quantized layers; with `wanted`, those of integers for which it holds."""
    layers = {}
    for layer, algorithm, info in quantized_layers(checkpoint):
        if wanted is not None and FORMATS[algorithm.scheme].integer_bits is None:
            continue
        rows, columns = shape_of(checkpoint, algorithm, layer, info)
        stored = stored_linear(checkpoint, layer, columns, rows)
        if stored is not None and (wanted is None or wanted(layer, stored)):
            layers[layer] = stored
    return layers


def _stacks_with_points(checkpoint: Checkpoint, layers: Mapping[str, StoredLinear]) -> set[str]:
    """The experts' layers of which one has zero points outside the middle: then all get them, to be stored alike."""
    apart: set[str] = set()
    for layer, stored in layers.items():
        stack = of_all_experts(layer)
        new = stored.zero_point is not None and stack not in (layer, *apart)
        if new and Integers(checkpoint, stored).has_points:
            apart.add(stack)
    return apart


def _blocks(checkpoint: Checkpoint, layer: str, stored: StoredLinear, eight_bits: bool) -> list[Entry]:
    """A layer whose format has numbers that integers hold exactly."""
    info, form = stored.weight, stored.format
    scales = checkpoint.array(stored.scale.name)
    rows = len(scales)
    together = rows // info.shape[0]  # rows that share bytes
    bits = 8 if eight_bits else form.integer_bits
    assert bits is not None

    def pieces() -> Pieces:
        done = 0
        for codes in _steps(checkpoint, info, 4 * info.shape[1] * together):
            some = scales[done : done + len(codes) * together]
            done += len(some)
            numbers, factors = form.integers(Codes(codes, some, by_row=stored.by_row))
            unsigned = (numbers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
            yield f"{layer}.weight", unsigned if bits == 8 else pack_pairs(unsigned)
            yield f"{layer}.weight_scale", factors

    columns = info.shape[1] * form.numbers_in_byte // together
    weight = Entry(f"{layer}.weight", "U8", (rows, columns // BLOCK, BLOCK * bits // 8), pieces())
    return [weight, Entry(f"{layer}.weight_scale", "F32", (rows, columns // BLOCK))]


def _unsigned(
    checkpoint: Checkpoint, layer: str, stored: StoredLinear, *, eight_bits: bool, points: bool
) -> list[Entry]:
    """A layer in words or blocks as blocks, with its columns sorted by group. Scales keep their groups."""
    integers = Integers(checkpoint, stored)
    widening = eight_bits and integers.bits == 4

    def pieces() -> Pieces:
        for begin, end in _row_steps(integers):
            codes = integers.codes(begin, end)
            if widening:  # with its zero point in the middle
                by_group = codes.astype(np.int16).reshape(end - begin, integers.groups, -1)
                by_group += 128 - integers.zero_points[begin:end, :, None]
                codes = by_group.astype(np.uint8).reshape(codes.shape)
            yield f"{layer}.weight", codes if widening or integers.bits == 8 else pack_pairs(codes)

    byte_count = BLOCK if widening else BLOCK * integers.bits // 8
    shape = (integers.outputs, integers.inputs // BLOCK, byte_count)
    entries = [Entry(f"{layer}.weight", "U8", shape, pieces()), *_scales(layer, integers)]
    if not widening and (points or integers.has_points):
        entries.append(_whole(f"{layer}.weight_zero_point", integers.zero_points.astype(np.uint8)))
    return entries


def _signed(checkpoint: Checkpoint, layer: str, stored: StoredLinear, *, points: bool) -> list[Entry]:
    """A layer in words or blocks in two's complement, with its columns sorted by group."""
    integers = Integers(checkpoint, stored)
    middle = integers.middle

    def pieces() -> Pieces:
        for begin, end in _row_steps(integers):
            codes = integers.codes(begin, end) ^ np.uint8(middle)
            yield f"{layer}.weight", pack_pairs(codes) if integers.bits == 4 else codes.view(np.int8)

    dtype, columns = ("U8", integers.inputs // 2) if integers.bits == 4 else ("I8", integers.inputs)
    weight = Entry(f"{layer}.weight", dtype, (integers.outputs, columns), pieces())
    entries = [weight, *_scales(layer, integers)]
    if points or integers.has_points:
        term = integers.scales.astype(np.float32) * (middle - integers.zero_points)
        entries.append(_whole(f"{layer}.weight_zero_term", term.astype(np.float32)))
    return entries


def _scales(layer: str, integers: Integers) -> list[Entry]:
    entries = [_whole(f"{layer}.weight_scale", integers.scales)]
    if integers.zero_term is not None:
        entries.append(_whole(f"{layer}.weight_zero_term", integers.zero_term))
    order = integers.order
    if order is None and integers.ordered and of_all_experts(layer) != layer:  # beside experts that have one
        order = np.arange(integers.inputs)
    if order is not None:
        entries.append(_whole(f"{layer}.weight_order", order))
    return entries


def _whole(name: str, array: NDArray[Any]) -> Entry:
    return Entry(name, _NAMES[array.dtype], array.shape, [(name, array)])


def _row_steps(integers: Integers) -> Iterator[tuple[int, int]]:
    """Ranges of outputs whose numbers fit a step, each of whole words of eight outputs."""
    step = max(8, STEP_BYTES // (4 * integers.inputs) // 8 * 8)
    for begin in range(0, integers.outputs, step):
        yield begin, min(begin + step, integers.outputs)


def _steps(checkpoint: Checkpoint, info: TensorInfo, row_bytes: int) -> Iterator[NDArray[Any]]:
    """Some rows of a tensor at a time."""
    array = checkpoint.array(info.name)
    step = max(1, STEP_BYTES // row_bytes)
    for begin in range(0, len(array), step):
        yield array[begin : begin + step]


def _rewritten(
    checkpoint: Checkpoint,
    layers: Mapping[str, StoredLinear],
    entries: Callable[[str, StoredLinear], list[Entry]],
    out: Path,
    progress: Progress,
    *,
    dropped: Collection[str] = (),
    quantized: bool = True,
) -> Checkpoint:
    """The checkpoint with other tensors of some layers, all but their `pre_quant_scale`, and without `dropped`. The
    same one where there are no such layers.

    `quantized`: whether its configuration still holds.
    """
    if quantized and not layers:
        return checkpoint
    out.mkdir(parents=True, exist_ok=True)
    weights = {stored.weight.name: layer for layer, stored in layers.items()}
    replaced = {
        *dropped,
        *(info.name for s in layers.values() for info in s.tensors if info is not s.pre_quant_scale),
    }

    def new_entries(info: TensorInfo) -> list[Entry]:
        if (layer := weights.get(info.name)) is not None:
            return entries(layer, layers[layer])
        return [] if info.name in replaced else [as_it_is(checkpoint, info)]

    tensors = checkpoint.tensors.values()
    groups = multiplied_as_one(tensors, lambda info: info.name.rpartition(".")[0]).values()
    total = sum(info.nbytes for info in tensors)

    def shards() -> Iterator[tuple[str, list[Entry]]]:
        done = 0
        for file in checkpoint.files:
            progress("repack", done, total)
            stored_here = [info for group in groups for info in group if info.file == file]
            yield file.name, [entry for info in stored_here for entry in new_entries(info)]
            done += sum(info.nbytes for info in stored_here)

    config = read_object(checkpoint.directory / "config.json")
    said = checkpoint.directory / QUANT_CONFIG
    if not quantized:
        config = {key: value for key, value in config.items() if key not in SECTIONS}
    elif said.is_file():
        write_object(out / QUANT_CONFIG, read_object(said))
    write_checkpoint(checkpoint.directory, out, shards(), config)
    progress("repack", total, total)
    return Checkpoint(out)
