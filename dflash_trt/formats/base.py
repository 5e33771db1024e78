"""The contract of a number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, ...]
Floats = NDArray[np.float32]
FLOAT_DTYPES = ("BF16", "F16", "F32")  # names in safetensors
EXPONENT_DTYPES = ("U8", "F8_E8M0")  # powers of two: exponents + 127
ONE: tuple[Shape, ...] = ((), (1,))  # shapes of a tensor with one number
# Weights per scale in the blocks that ONNX Runtime multiplies. With larger blocks its kernels round one row otherwise
# than several: the tokens would depend on drafting (docs/quantization.md).
BLOCK = 32
# How an engine reads quantized layers: as checkpoints have them; INT4 with two columns of a row in a byte, as ONNX and
# TensorRT have it; or in blocks of integers.
WeightLayout = Literal["stored", "int4_by_row", "blocks"]
# How a file names and packs the tensors of a layer (checkpoint/layouts.py).
FileLayout = Literal["plain", "packed", "scale_inv", "gptq", "gptq_v2", "awq"]


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


class NumberFormat(ABC):
    """A kind of numbers for the weights [out, in] of linear layers, with their scales."""

    name: str
    algorithms: tuple[Algorithm, ...]
    # Supported weights per scale, the usual number first. Empty if a row or the whole weight shares a scale.
    group_sizes: tuple[int, ...] = ()
    numbers_in_byte = 2
    even_rows = False  # whether two rows share bytes
    # Compute capabilities with arithmetic in this format. None: weights are widened, which works on every GPU.
    capabilities: tuple[int, ...] | None = None
    # Model Optimizer's configuration for calibration. None: only the weights are quantized.
    modelopt_config: str | None = None
    # Whether inputs are quantized too, to the same numbers.
    activations = False
    # Whether a scale may belong to the whole weight or to a row, rather than to a group.
    scale_by_row = False
    # The scale of stacked experts that is repeated for each of their rows.
    expanded: str | None = None
    # Bits of the integers that hold its numbers exactly; None where there are none. A layer may then lie in blocks,
    # as unsigned integers [out, blocks, BLOCK * bits / 8], whose zero is 2 ** (bits - 1). Their float32 scales are
    # [out, blocks]. Numbers of fewer bits may have 8 there, too.
    integer_bits: int | None = None

    # Reading

    @abstractmethod
    def forms(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
        """The forms of a layer's tensors, by the end of their names: weight, weight_scale, weight_scale_2."""

    @abstractmethod
    def widen(
        self,
        algorithm: Algorithm,
        codes: NDArray[Any],
        scale: NDArray[Any],
        global_scale: NDArray[Any] | None,
        *,
        by_row: bool,
    ) -> Floats:
        """The values of the codes, float32 [rows, columns]."""

    def block_forms(self, rows: int, columns: int) -> dict[str, Form]:
        """As `forms`, of a layer in blocks."""
        assert self.integer_bits is not None
        blocks = columns // BLOCK
        shapes = [(rows, blocks, BLOCK * bits // 8) for bits in dict.fromkeys((self.integer_bits, 8))]
        return {
            "weight": Form(shapes, ["U8"]),
            "weight_scale": Form([(rows, blocks)], ["F32"]),
        }

    def integers(
        self, codes: NDArray[Any], scale: NDArray[Any], *, by_row: bool
    ) -> tuple[NDArray[np.int8], Floats]:
        """Integers [rows, columns] and float32 scales [rows, columns / BLOCK] of the same numbers."""
        raise NotImplementedError(f"{self.name} is not made of integers")

    @abstractmethod
    def nbytes(self, parameters: int, rows: int, group_size: int) -> int:
        """Bytes of weights with this many numbers and rows, including their scales."""

    # Writing

    @abstractmethod
    def algorithm(self, *, calibrated: bool, inputs: Sequence[int]) -> Algorithm:
        """The algorithm that `dflash-trt quantize` uses for layers with these numbers of inputs."""

    @abstractmethod
    def written(self, algorithm: Algorithm, rows: int, columns: int) -> dict[str, tuple[str, Shape]]:
        """Dtype and shape of the tensors that `encode` returns, by the end of their names."""

    def shared_scale(self, algorithm: Algorithm) -> str | None:
        """The name of the tensor with the scale of the whole weight; None if there is none."""
        return None

    def scale_of(self, largest: float | NDArray[Any]) -> Floats:
        """The scale of a whole weight, or of an input, from its largest magnitude."""
        raise NotImplementedError(f"{self.name} has no scale of a whole tensor")

    @abstractmethod
    def encode(self, algorithm: Algorithm, rows: Floats, shared: Floats) -> dict[str, NDArray[Any]]:
        """Codes and scales of some rows of a weight, by the end of their tensors' names."""

    @property
    @abstractmethod
    def byte_values(self) -> NDArray[np.float32]:
        """The numbers in each of the 256 possible bytes of a weight, [256, numbers_in_byte]."""
