"""The numbers of a quantized linear layer: what its codes, scales and zero points stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.layouts import integer_bits
from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.formats.base import BLOCK, Codes
from dflash_trt.formats.numbers import unpack_awq, unpack_words


def widened_pieces(checkpoint: Checkpoint, stored: StoredLinear, step: int) -> Iterator[NDArray[np.float32]]:
    """The weight that the codes represent, float32 [out, in], without pre_quant_scale; about `step` rows at a time."""
    if stored.in_words or stored.in_blocks:
        integers = Integers(checkpoint, stored)
        step = max(8, step // 8 * 8)
        for begin in range(0, integers.outputs, step):
            yield integers.widened(begin, min(begin + step, integers.outputs))
        return
    codes, scale = checkpoint.array(stored.weight.name), checkpoint.array(stored.scale.name)
    second = None if stored.global_scale is None else checkpoint.array(stored.global_scale.name)
    together, block = 1 if stored.by_row else 2, stored.algorithm.group_rows
    step = max(1, step // (together * block)) * together * block
    for begin in range(0, len(codes) * together, step):
        some = scale
        if scale.size > 1 or block > 1:
            some = scale[begin // block : -(-(begin + step) // block)]
        rows = codes[begin // together : (begin + step) // together]
        wide = stored.format.widen(stored.algorithm, Codes(rows, some, second, stored.by_row))
        if stored.zero_term is not None:
            term = checkpoint.array(stored.zero_term.name)[begin : begin + step]
            wide += np.repeat(term, stored.algorithm.group_size, axis=1)
        yield wide if stored.order is None else _placed(wide, checkpoint.array(stored.order.name))


def _placed(columns: NDArray[np.float32], order: NDArray[np.int64]) -> NDArray[np.float32]:
    """Sorted columns where they are in the model."""
    placed = np.empty_like(columns)
    placed[:, order] = columns
    return placed


class Integers:
    """The unsigned codes of a layer of integers in words or in blocks, with their scales and zero points."""

    def __init__(self, checkpoint: Checkpoint, stored: StoredLinear) -> None:
        """Raises CheckpointError if a zero point or a column's group cannot be read."""
        self._stored, layout = stored, stored.algorithm.layout
        array = checkpoint.array(stored.weight.name)
        scale = checkpoint.array(stored.scale.name)
        self._awq = stored.in_words and layout == "awq"
        self.bits = integer_bits(stored.algorithm)
        if stored.in_words:
            scale = scale.T
        elif stored.weight.dtype != "I32" and array.dtype == np.uint8:
            self.bits = 8 * stored.weight.shape[2] // BLOCK
        self._array = array.reshape(len(array), -1)
        self.scales: NDArray[Any] = scale  # [out, groups], in the file's dtype
        self.outputs, self.groups = scale.shape
        self.inputs = (
            self._array.shape[0] if self._awq else self._array.nbytes * 8 // self.bits // self.outputs
        )
        self.ordered = stored.algorithm.ordered
        self.zero_points = self._zero_points(checkpoint)
        term = stored.zero_term
        self.zero_term: NDArray[np.float32] | None = None if term is None else checkpoint.array(term.name)
        self.order = self._order(checkpoint)

    def _zero_points(self, checkpoint: Checkpoint) -> NDArray[np.int16]:
        """[out, groups]"""
        info = self._stored.zero_point
        if info is None:
            return np.full(self.scales.shape, self.middle, np.int16)
        array = checkpoint.array(info.name)
        if array.dtype == np.uint8:
            return array.astype(np.int16)
        if not self._stored.in_words:  # compressed-tensors packs them along the outputs
            return unpack_words(array.T, self.bits).T.astype(np.int16)
        words = unpack_awq(array) if self._awq else unpack_words(array, self.bits)
        points = words.T.astype(np.int16)
        if self._stored.algorithm.layout == "gptq":
            points += 1
            if points.max(initial=0) == 1 << self.bits:
                raise CheckpointError(
                    f"{info.file}: tensor {quoted(info.name)} has a zero point of {points.max() - 1}, which readers of "
                    "GPTQ's first format take for 0 or for one more; save it again as gptq_v2 (with GPTQModel)"
                )
        return points

    def _order(self, checkpoint: Checkpoint) -> NDArray[np.int64] | None:
        """The columns sorted by their groups; None if they are so in the file."""
        if self._stored.order is not None:
            return checkpoint.array(self._stored.order.name)
        info = self._stored.group_index
        if info is None:
            return None
        index = checkpoint.array(info.name)
        size = self.inputs // self.groups
        order = np.argsort(index, kind="stable")
        if not np.array_equal(index[order], np.arange(self.inputs) // size):
            raise CheckpointError(
                f"{info.file}: tensor {quoted(info.name)} does not give {size} columns to each of {self.groups} groups"
            )
        if np.array_equal(order, np.arange(self.inputs)):
            return None
        if not self._stored.algorithm.ordered:
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

    @property
    def moved(self) -> bool:
        """Whether the columns of `codes` are in the order of `order` only once they are moved to it."""
        return self.order is not None and self._stored.order is None

    def codes(self, begin: int, end: int) -> NDArray[np.uint8]:
        """The codes of some rows, [rows, in], with the columns of a group side by side."""
        if self._awq:
            first = begin // 8
            whole = unpack_awq(self._array[:, first : -(-end // 8)])
            return np.ascontiguousarray(whole.T[begin - 8 * first : end - 8 * first])
        rows = self._array[:, begin:end].T if self._stored.in_words else self._array[begin:end]
        codes = unpack_words(np.ascontiguousarray(rows).view(np.int32), self.bits)
        return codes[:, self.order] if self.moved else codes

    def widened(self, begin: int, end: int) -> NDArray[np.float32]:
        """The numbers of some rows, float32 [rows, in], with the columns where they are in the model."""
        codes = self.codes(begin, end).astype(np.int16).reshape(end - begin, self.groups, -1)
        numbers = (codes - self.zero_points[begin:end, :, None]).astype(np.float32)
        wide = numbers * self.scales[begin:end].astype(np.float32)[..., None]
        if self.zero_term is not None:
            wide += self.zero_term[begin:end, :, None]
        wide = wide.reshape(end - begin, -1)
        return wide if self.order is None else _placed(wide, self.order)
