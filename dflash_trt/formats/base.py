"""The contract of a number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .numbers import E4M3, E8M0, Floats, scale_for

Shape = tuple[int, ...]
FLOAT_DTYPES = ("BF16", "F16", "F32")  # names in safetensors
EXPONENT_DTYPES = ("U8", "F8_E8M0")  # powers of two: exponents + 127
ONE: tuple[Shape, ...] = ((), (1,))  # shapes of a tensor with one number
# Weights per scale in the blocks that ONNX Runtime multiplies. With larger blocks its kernels round one row otherwise
# than several: the tokens would depend on drafting (docs/quantization.md).
BLOCK = 32
# How an engine reads quantized layers: as checkpoints have them; INT4 with two columns of a row in a byte, as ONNX and
# TensorRT have it; or in blocks of integers.
WeightLayout = Literal["stored", "int4_by_row", "blocks"]
# How a file names and packs the tensors of a layer (checkpoint/layouts.py). Integers with the names of "plain" are
# "row_pairs" or "signed".
FileLayout = Literal[
    "plain", "packed", "scale_inv", "gptq", "gptq_v2", "awq", "blocks", "row_pairs", "signed"
]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The storage of a linear layer. `scheme` is the name of its format in FORMATS.

    activations: the layer's input is quantized too, to the same kind of numbers, with one scale for all rows or one
        for each. Inputs are not rounded where a checkpoint asks for scales of groups of an FP8 or MXFP4 input.
    static: the input's scale must be in the checkpoint.
    group_size: columns that share a scale; 0 if a row or the whole weight shares one.
    group_rows: rows that share it, too: a scale then belongs to a block of the weight.
    zero_points: integers have a zero point for each group, which is subtracted before the scale multiplies.
    ordered: the columns of a group are not neighbours; a tensor gives each column's group.
    reciprocal: the scales of whole tensors divide instead of multiplying.
    """

    name: str
    scheme: str
    activations: bool = False
    static: bool = False
    group_size: int = 0
    group_rows: int = 1
    zero_points: bool = False
    ordered: bool = False
    reciprocal: bool = False
    layout: FileLayout = "plain"


class Form(NamedTuple):
    """The allowed storage of a tensor: any of the shapes, the usual one first, in any of the dtypes."""

    shapes: Sequence[Shape]
    dtypes: Sequence[str]


class Codes(NamedTuple):
    """Some rows of a quantized weight: codes [rows, bytes] with their scales.

    second: the scale of the whole weight, beside those of its parts.
    """

    codes: NDArray[Any]
    scale: NDArray[Any]
    second: NDArray[Any] | None = None


class NumberFormat(ABC):
    """A kind of numbers for the weights [out, in] of linear layers, with their scales."""

    name: str
    algorithms: tuple[Algorithm, ...]
    # The numbers in each of the 256 possible bytes of a weight, float32 [256, numbers_in_byte].
    byte_values: Floats
    # Supported weights per scale, the usual number first. Empty if a row or the whole weight shares a scale.
    group_sizes: tuple[int, ...] = ()
    scale_bytes = 4
    even_rows = False  # whether two rows share bytes
    # Compute capabilities with arithmetic in this format. None: weights are widened, which works on every GPU.
    capabilities: tuple[int, ...] | None = None
    # Model Optimizer's configuration for calibration. None: only the weights are quantized.
    modelopt_config: str | None = None
    # The number to which a scale of a whole weight or of an input brings the largest one. None: there is no such scale,
    # and inputs are not quantized.
    largest: float | None = None
    # Whether a scale may belong to the whole weight or to a row, rather than to a group.
    scale_by_row = False
    # Bits of its numbers if they are integers, which may be written in other layouts (checkpoint/layouts.py).
    integer_bits: int | None = None

    @property
    def numbers_in_byte(self) -> int:
        return len(self.byte_values[0])

    @abstractmethod
    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """The forms of a layer's tensors, by the end of their names: weight, weight_scale, weight_scale_2."""

    @abstractmethod
    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        """Codes and scales of some rows of a weight, by the end of their tensors' names. `shared`: the weight's scale,
        from `scale_of`.
        """

    def algorithm(self, *, inputs: Sequence[int]) -> Algorithm:
        """The algorithm that `dflash-trt quantize` uses for layers with these numbers of inputs: with the largest group
        that divides all of them, if there is one.
        """
        fitting = [group for group in self.group_sizes if not any(n % group for n in inputs)]
        return replace(self.algorithms[0], group_size=next(iter(fitting), self.group_sizes[-1]))

    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        """Dtype and shape of the tensors that `quantize` writes, by the end of their names: the usual form, with scales
        in float32 where it may be.
        """
        forms = self.forms(algorithm, rows, columns)
        return {
            name: ("F32" if "F32" in dtypes else dtypes[0], shapes[0])
            for name, (shapes, dtypes) in forms.items()
        }

    def scale_of(self, magnitude: float | NDArray[Any]) -> Floats:
        """The scale of a whole weight, of a row, or of an input, from its largest magnitude."""
        assert self.largest is not None
        return scale_for(magnitude, self.largest)

    def widen(self, algorithm: Algorithm, stored: Codes) -> Floats:
        """The values of the codes, float32 [rows, columns]."""
        numbers = self.byte_values[stored.codes.view(np.uint8)].reshape(len(stored.codes), -1)
        factors = _widened(stored.scale)
        if stored.second is not None:
            second = np.asarray(stored.second, np.float32).reshape(())
            factors = factors / second if algorithm.reciprocal else factors * second
        if not algorithm.group_size:
            return numbers * factors.reshape(-1, 1)
        rows, columns = numbers.shape
        factors = np.repeat(factors.reshape(len(factors), -1), algorithm.group_rows, axis=0)[:rows]
        return numbers * np.repeat(factors, algorithm.group_size, axis=1)[:, :columns]

    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        """Bytes of weights with this many numbers and rows, including their scales. group_size 0: a row shares one."""
        scales = parameters // group_size if group_size else rows
        return -(-parameters // self.numbers_in_byte) + self.scale_bytes * scales


def _widened(scale: NDArray[Any]) -> Floats:
    """Scales in float32. Those in bytes are exponents, unless they are E4M3."""
    if scale.dtype.itemsize > 1 or scale.dtype == E4M3:
        return scale.astype(np.float32)
    return E8M0[scale.view(np.uint8)]
