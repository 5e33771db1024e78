"""A quantized checkpoint as one engine reads it: integers laid out otherwise, the same numbers in BF16.

Its first part gives the numbers of a stored layer: what its codes, scales and zero points stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.layouts import INTEGERS, integer_bits
from dflash_trt.checkpoint.linears import StoredLinear, quantized_layers, shape_of, stored_linear
from dflash_trt.checkpoint.quantization import QUANT_CONFIG, SECTIONS
from dflash_trt.checkpoint.rules import CACHE_SCALES
from dflash_trt.checkpoint.tensors import DTYPES, Checkpoint, TensorInfo, role_of
from dflash_trt.checkpoint.writer import Entry, write_checkpoint
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.files.disk import write_object
from dflash_trt.files.reading import read_config, read_object
from dflash_trt.formats.base import BLOCK, Codes
from dflash_trt.formats.numbers import pack_pairs
from dflash_trt.quantization.convert import STEP_BYTES, as_it_is
from dflash_trt.quantization.layers import multiplied_as_one, of_all_experts


def widened_pieces(checkpoint: Checkpoint, stored: StoredLinear, step: int) -> Iterator[NDArray[np.float32]]:
    """The weight that the codes represent, float32 [out, in], without pre_quant_scale; about `step` rows at a time."""
    if stored.integer:
        integers = Integers(checkpoint, stored)
        for begin, end in integers.steps(step):
            yield integers.widened(begin, end)
        return
    codes, scale = checkpoint.array(stored.weight.name), checkpoint.array(stored.scale.name)
    second = None if stored.global_scale is None else checkpoint.array(stored.global_scale.name)
    scale, block = scale.reshape(stored.scale.shape), stored.algorithm.group_rows
    step = max(1, step // block) * block
    for begin in range(0, len(codes), step):
        some = scale
        if scale.size > 1 or block > 1:
            some = scale[begin // block : -(-(begin + step) // block)]
        yield stored.format.widen(stored.algorithm, Codes(codes[begin : begin + step], some, second))


class Integers:
    """A layer of integers of any layout, as one: unsigned codes with the columns of a group side by side.

    scales [out, groups], in the file's dtype. zero_points [out, groups]. zero_term: float32 [out, groups], added to
    each number. order: int64 [in], the input of each column of `codes`; None: they are in order. ordered: whether the
    file may have another order.
    """

    def __init__(self, checkpoint: Checkpoint, stored: StoredLinear) -> None:
        """Raises CheckpointError if a zero point or a column's group cannot be read."""
        self._stored, self._layout = stored, INTEGERS[stored.layout]
        self._weight, shape = checkpoint.array(stored.weight.name), stored.weight.shape
        self.bits = 8 * shape[2] // BLOCK if stored.layout == "blocks" else integer_bits(stored.algorithm)
        scales = checkpoint.array(stored.scale.name)
        self.scales: NDArray[Any] = scales.T if self._layout.by_group else scales
        self.outputs, self.inputs = self._layout.shape(shape, self.bits)
        self.groups, self.ordered = self.scales.shape[1], stored.algorithm.ordered
        self.zero_points = self._zero_points(checkpoint)
        self.zero_term: NDArray[np.float32] | None = self._optional(checkpoint, "zero_term")
        self.order = self._order(checkpoint)

    def _optional(self, checkpoint: Checkpoint, part: str) -> NDArray[Any] | None:
        info = getattr(self._stored, part)
        return None if info is None else checkpoint.array(info.name)

    def _zero_points(self, checkpoint: Checkpoint) -> NDArray[np.int16]:
        info, array = self._stored.zero_point, self._optional(checkpoint, "zero_point")
        if info is None or array is None:
            return np.full(self.scales.shape, self.middle, np.int16)
        points = self._layout.points(array, self.bits).astype(np.int16)
        if self._stored.layout == "gptq":
            points += 1
            if points.max(initial=0) == 1 << self.bits:
                raise CheckpointError(
                    f"{info.file}: tensor {quoted(info.name)} has a zero point of {points.max() - 1}, which readers of "
                    "GPTQ's first format take for 0 or for one more; save it again as gptq_v2 (with GPTQModel)"
                )
        return points

    def _order(self, checkpoint: Checkpoint) -> NDArray[np.int64] | None:
        info, index = self._stored.group_index, self._optional(checkpoint, "group_index")
        if info is None or index is None:
            return self._optional(checkpoint, "order")
        size = self.inputs // self.groups
        order = np.argsort(index, kind="stable")
        if not np.array_equal(index[order], np.arange(self.inputs) // size):
            raise CheckpointError(
                f"{info.file}: tensor {quoted(info.name)} does not give {size} columns to each of {self.groups} groups"
            )
        if np.array_equal(order, np.arange(self.inputs)):
            return None
        if not self.ordered:
            raise CheckpointError(
                f"{info.file}: tensor {quoted(info.name)} has columns in another order, but desc_act is false in "
                f"{checkpoint.quantization.path.name}"
            )
        return order

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    @property
    def has_points(self) -> bool:
        """Whether any zero point is not the middle."""
        return bool((self.zero_points != self.middle).any())

    def steps(self, rows: int) -> Iterator[tuple[int, int]]:
        """Ranges of about so many outputs, each but the last a multiple of eight, which may share words."""
        step = max(8, rows // 8 * 8)
        for begin in range(0, self.outputs, step):
            yield begin, min(begin + step, self.outputs)

    def codes(self, begin: int, end: int) -> NDArray[np.uint8]:
        """The codes of the rows of a step, [rows, in]."""
        codes = self._layout.codes(self._weight, self.bits, begin, end)
        # Those with an order of their own were sorted as they were written.
        sort = self._stored.group_index is not None and self.order is not None
        return codes[:, self.order] if sort else np.ascontiguousarray(codes)

    def widened(self, begin: int, end: int) -> NDArray[np.float32]:
        """The numbers of the rows of a step, float32 [rows, in], with the columns where they are in the model."""
        codes = self.codes(begin, end).astype(np.int16).reshape(end - begin, self.groups, -1)
        wide = (codes - self.zero_points[begin:end, :, None]).astype(np.float32)
        wide *= self.scales[begin:end].astype(np.float32)[..., None]
        if self.zero_term is not None:
            wide += self.zero_term[begin:end, :, None]
        wide = wide.reshape(end - begin, -1)
        if self.order is None:
            return wide
        placed = np.empty_like(wide)
        placed[:, self.order] = wide
        return placed


_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Layers = Mapping[str, StoredLinear]


def in_bf16(checkpoint: Checkpoint, out: Path, progress: Progress) -> Checkpoint:
    """The checkpoint with its layers of FP8, NVFP4 and MXFP4 widened to BF16: written to `out`, unless it has none.

    Rounding of inputs is left out. Raises CheckpointError where a layer lacks a tensor or has it in another form.
    """
    chosen = {layer: stored for layer, stored in _stored_layers(checkpoint).items() if not stored.integer}
    return _rewritten(checkpoint, chosen, lambda *layer: _widened(checkpoint, *layer), out, progress)


def int4_by_row(checkpoint: Checkpoint, out: Path, progress: Progress) -> Checkpoint:
    """The checkpoint with its integers in two's complement by row, two columns of INT4 per byte, as ONNX and
    TensorRT read them: written to `out`, unless it has them so already.
    """
    layers = _stored_layers(checkpoint).items()
    chosen = {layer: stored for layer, stored in layers if stored.integer and stored.layout != "signed"}
    apart = _stacks_with_points(checkpoint, chosen)

    def entries(layer: str, stored: StoredLinear) -> list[Entry]:
        return _signed(layer, Integers(checkpoint, stored), points=of_all_experts(layer) in apart)

    return _rewritten(checkpoint, chosen, entries, out, progress)


def in_blocks(
    checkpoint: Checkpoint,
    out: Path,
    progress: Progress,
    *,
    eight_bits: bool = False,
    channels: bool = False,
) -> Checkpoint:
    """The checkpoint as ONNX Runtime multiplies it, integers in blocks and all other layers in BF16: written to `out`,
    unless it is so already.

    Layers of one input lie one after the other. With `eight_bits` numbers of four bits take eight, except in experts.
    With `channels` INT8 layers with one scale for each output stay as they are, except in experts.
    """

    def others(layer: str, stored: StoredLinear) -> bool:
        """Whether the bytes are not yet those that ONNX Runtime multiplies."""
        if stored.layout != "blocks":
            return ".experts." in layer or not (channels and stored.per_channel)
        return eight_bits and stored.weight.shape[2] < BLOCK and ".experts." not in layer

    chosen = {layer: stored for layer, stored in _stored_layers(checkpoint).items() if others(layer, stored)}
    apart = _stacks_with_points(checkpoint, chosen)

    def entries(layer: str, stored: StoredLinear) -> list[Entry]:
        if not stored.integer:
            return _widened(checkpoint, layer, stored)
        stack = of_all_experts(layer)
        wide = eight_bits and stack == layer
        return _unsigned(layer, Integers(checkpoint, stored), eight_bits=wide, points=stack in apart)

    return _rewritten(checkpoint, chosen, entries, out, progress)


def _stored_layers(checkpoint: Checkpoint) -> dict[str, StoredLinear]:
    """The quantized layers, except those that every engine refuses."""
    layers = {}
    for layer, algorithm, info in quantized_layers(checkpoint):
        if role_of(info.name) in ("embedding", "router"):
            continue
        rows, columns = shape_of(checkpoint, algorithm, layer, info)
        if (stored := stored_linear(checkpoint, layer, columns, rows)) is not None:
            layers[layer] = stored
    return layers


def _stacks_with_points(checkpoint: Checkpoint, layers: Layers) -> set[str]:
    """The experts' layers of which one has zero points outside the middle: then all get them, to be stored alike."""
    apart: set[str] = set()
    for layer, stored in layers.items():
        stack = of_all_experts(layer)
        new = stored.zero_point is not None and stack not in (layer, *apart)
        if new and Integers(checkpoint, stored).has_points:
            apart.add(stack)
    return apart


def _widened(checkpoint: Checkpoint, layer: str, stored: StoredLinear) -> list[Entry]:
    name, smooth = f"{layer}.weight", np.ones(1, np.float32)
    shape = shape_of(checkpoint, stored.algorithm, layer, stored.weight)
    if stored.pre_quant_scale is not None:
        smooth = checkpoint.array(stored.pre_quant_scale.name).astype(np.float32)
    rows = widened_pieces(checkpoint, stored, STEP_BYTES // (4 * shape[1]))
    return [Entry(name, "BF16", shape, ((name, (some * smooth).astype(ml_dtypes.bfloat16)) for some in rows))]


def _unsigned(layer: str, integers: Integers, *, eight_bits: bool, points: bool) -> list[Entry]:
    """A layer in blocks, with its columns sorted by group. Scales keep their groups."""
    widening = eight_bits and integers.bits == 4

    def packed(codes: NDArray[np.uint8], begin: int, end: int) -> NDArray[np.uint8]:
        if not widening:
            return codes if integers.bits == 8 else pack_pairs(codes)
        by_group = codes.astype(np.int16).reshape(end - begin, integers.groups, -1)
        by_group += 128 - integers.zero_points[begin:end, :, None]  # the zero point is in the middle then
        return by_group.astype(np.uint8).reshape(codes.shape)

    byte_count = BLOCK if widening else BLOCK * integers.bits // 8
    shape = (integers.outputs, integers.inputs // BLOCK, byte_count)
    entries = [_codes(layer, "U8", shape, integers, packed), *_scales(layer, integers)]
    if not widening and (points or integers.has_points):
        entries.append(_whole(f"{layer}.weight_zero_point", integers.zero_points.astype(np.uint8)))
    return entries


def _signed(layer: str, integers: Integers, *, points: bool) -> list[Entry]:
    """A layer in two's complement, with its columns sorted by group."""
    middle = integers.middle

    def packed(codes: NDArray[np.uint8], begin: int, end: int) -> NDArray[Any]:
        numbers: NDArray[np.uint8] = codes ^ np.uint8(middle)
        return pack_pairs(numbers) if integers.bits == 4 else numbers.view(np.int8)

    dtype, columns = ("U8", integers.inputs // 2) if integers.bits == 4 else ("I8", integers.inputs)
    entries = [_codes(layer, dtype, (integers.outputs, columns), integers, packed), *_scales(layer, integers)]
    if points or integers.has_points:
        term = integers.scales.astype(np.float32) * (middle - integers.zero_points)
        entries.append(_whole(f"{layer}.weight_zero_term", term.astype(np.float32)))
    return entries


def _codes(
    layer: str,
    dtype: str,
    shape: tuple[int, ...],
    integers: Integers,
    packed: Callable[[NDArray[np.uint8], int, int], NDArray[Any]],
) -> Entry:
    steps = integers.steps(STEP_BYTES // (4 * integers.inputs))
    name = f"{layer}.weight"
    return Entry(name, dtype, shape, ((name, packed(integers.codes(*rows), *rows)) for rows in steps))


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


def _rewritten(
    checkpoint: Checkpoint,
    layers: Layers,
    entries: Callable[[str, StoredLinear], list[Entry]],
    out: Path,
    progress: Progress,
) -> Checkpoint:
    """The checkpoint with other tensors of some layers. The same one where there are no such layers.

    Its configuration still holds if a layer is quantized after it: all that are not of integers become BF16.
    """
    if not layers:
        return checkpoint
    out.mkdir(parents=True, exist_ok=True)
    quantized = any(
        layer not in layers or layers[layer].integer for layer, *_ in quantized_layers(checkpoint)
    )
    weights = {stored.weight.name: layer for layer, stored in layers.items()}
    replaced = {
        info.name
        for stored in layers.values()
        for info in stored.tensors
        if info is not stored.pre_quant_scale or not stored.integer
    }
    if not quantized and checkpoint.quantization.kv_cache:
        replaced |= {name for name in checkpoint.tensors if name.endswith(CACHE_SCALES)}

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

    config = read_config(checkpoint.directory / "config.json")
    own_config = checkpoint.directory / QUANT_CONFIG
    if not quantized:
        config = {key: value for key, value in config.items() if key not in SECTIONS}
    elif own_config.is_file():
        write_object(out / QUANT_CONFIG, read_object(own_config))
    write_checkpoint(checkpoint.directory, out, shards(), config)
    progress("repack", total, total)
    return Checkpoint(out)
