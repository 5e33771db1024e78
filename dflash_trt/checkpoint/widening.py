"""The numbers of a quantized linear layer: what its codes, scales and zero points stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.layouts import INTEGERS, integer_bits
from dflash_trt.checkpoint.linears import StoredLinear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.formats.base import BLOCK, Codes


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
