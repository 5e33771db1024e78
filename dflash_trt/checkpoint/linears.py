"""A quantized linear layer as a checkpoint stores it: one representation for all formats, checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dflash_trt.checkpoint.layouts import (
    INTEGERS,
    WEIGHTS,
    WORD,
    LayerTensors,
    blocks,
    integer_bits,
    is_integer,
    parts,
    signed,
    weight_end,
    weight_name,
)
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, TensorInfo, adjacent, same_bytes
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.formats import FORMATS, Algorithm, NumberFormat
from dflash_trt.formats.base import BLOCK, EXPONENT_DTYPES, FLOAT_DTYPES, FileLayout, Form
from dflash_trt.formats.floats import FP8


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """The tensors of a quantized linear layer [out, in]. Scales multiply the values of the codes.

    weight, scale: see the format's `forms` and checkpoint/layouts.py.
    global_scale: one number that multiplies every scale, or divides it (`Algorithm.reciprocal`).
    input_scale: one number for the activations. None with quantized activations: every row has its own scale.
    pre_quant_scale: [in], multiplies the input first (AWQ of Model Optimizer).
    zero_point: what is subtracted from the unsigned codes of each group, unsigned too: uint8 [out, groups], or in words
        as the file has it.
    zero_term: float32 [out, groups], what is to be added to the product of two's complement codes, or of codes less
        their middle, for each group, times the sum of the group's inputs.
    order: int64 [in], the input of each column of the codes. None: they are in order.
    group_index: int32 [in], the group of each column of the codes, as the file has it.
    shape: int64 [2], outputs and inputs, as the file has it.
    """

    algorithm: Algorithm
    weight: TensorInfo
    scale: TensorInfo
    global_scale: TensorInfo | None = None
    input_scale: TensorInfo | None = None
    pre_quant_scale: TensorInfo | None = None
    zero_point: TensorInfo | None = None
    zero_term: TensorInfo | None = None
    order: TensorInfo | None = None
    group_index: TensorInfo | None = None
    shape: TensorInfo | None = None

    @property
    def format(self) -> NumberFormat:
        return FORMATS[self.algorithm.scheme]

    @property
    def rounding(self) -> Literal["none", "static", "row"]:
        """The scales of inputs that are rounded: one in the file, or one for each row."""
        if not self.algorithm.activations:
            return "none"
        return "row" if self.input_scale is None else "static"

    @property
    def exponents(self) -> bool:
        """Whether the scales of FP8 are bytes, powers of two."""
        return self.scale.dtype in EXPONENT_DTYPES and self.algorithm.scheme == FP8.name

    @property
    def integer(self) -> bool:
        return is_integer(self.algorithm)

    @property
    def layout(self) -> FileLayout:
        """The algorithm's, or that in which integers were written for an engine."""
        return _layout(self.algorithm, self.weight, self.scale)

    @property
    def per_channel(self) -> bool:
        """Whether the weight is in two's complement, a number in each byte, with one scale for each output."""
        plain = self.zero_point is None and self.zero_term is None and self.order is None
        return plain and self.weight.dtype == "I8" and self.scale.shape[1:] == (1,)

    @property
    def tensors(self) -> list[TensorInfo]:
        values = [getattr(self, f.name) for f in fields(self)]
        return [value for value in values if isinstance(value, TensorInfo)]


def stored_linear(
    checkpoint: Checkpoint | Outline, layer: str, inputs: int, outputs: int
) -> StoredLinear | None:
    """The quantized layer whose tensors begin with `layer`; None if its weight is in floating point.

    Raises CheckpointError, naming the tensor, if one is missing or has a shape or dtype that its format does not
    have.
    """
    algorithm = algorithm_of(checkpoint, layer)
    if algorithm is None:
        return None
    algorithm = _checked(checkpoint, algorithm, layer, inputs, outputs)
    tensors: dict[str, Any] = {}
    for field_name, part in _parts(checkpoint, algorithm, layer, inputs, outputs).items():
        names = [name for name in part.names if f"{layer}.{name}" in checkpoint.tensors]
        if part.needed or names:
            name = (names or part.names)[0]
            tensors[field_name] = _expect(checkpoint, algorithm, layer, name, part.form)
    scale = tensors["scale"]
    if len(scale.shape) == 4:  # of blocks, as Model Optimizer has them
        tensors["scale"] = replace(scale, shape=scale.shape[::2])
    if "shape" in tensors:
        _check_shape(checkpoint, layer, tensors["shape"], (outputs, inputs))
    return StoredLinear(algorithm, **tensors)


def algorithm_of(checkpoint: Checkpoint | Outline, layer: str) -> Algorithm | None:
    """The algorithm of a layer; None if its weight is in floating point. The tensors tell that, where there are any."""
    if isinstance(checkpoint, Outline) or (codes := checkpoint.codes(layer)) is None:
        weight = checkpoint.tensors.get(f"{layer}.weight")
        floats = weight is not None and weight.dtype in FLOAT_DTYPES
        return None if floats else checkpoint.quantization.algorithm(layer)
    if (named := checkpoint.quantization.algorithm(layer)) is not None:
        return named
    end = codes.name.rpartition(".")[2]  # where the file names none, it is the only one with such weights
    fitting = [a for a in checkpoint.quantization.algorithms if end in ("weight", weight_end(a.layout))]
    return fitting[0] if len(fitting) == 1 else None


def _checked(
    checkpoint: Checkpoint | Outline, algorithm: Algorithm, layer: str, inputs: int, outputs: int
) -> Algorithm:
    """The algorithm of a layer with so many inputs and outputs. A row of integers is a group, too."""
    kind, group = FORMATS[algorithm.scheme], algorithm.group_size
    layer_is = f"{checkpoint.quantization.path}: {layer} is {algorithm.name}"
    if is_integer(algorithm) and not group:
        algorithm, group = replace(algorithm, group_size=inputs), BLOCK
    if group and inputs % group and algorithm.group_rows == 1:
        raise CheckpointError(f"{layer_is} in groups of {group}, but has {inputs} inputs")
    if kind.even_rows and outputs % 2 and algorithm.layout == "plain":
        raise CheckpointError(f"{layer_is}, but has {outputs} outputs")
    if algorithm.zero_points and outputs * (kind.integer_bits or 0) % WORD:
        raise CheckpointError(
            f"{layer_is}, but has {outputs} outputs, which do not fill the words of its zero points"
        )
    return algorithm


def _parts(
    checkpoint: Checkpoint | Outline, algorithm: Algorithm, layer: str, inputs: int, outputs: int
) -> LayerTensors:
    """The tensors to expect. Those of a layer of integers may have been written anew for an engine."""
    if is_integer(algorithm):
        weight, plain = checkpoint.tensors.get(f"{layer}.weight"), algorithm.layout == "plain"
        outlined = isinstance(checkpoint, Outline) and weight is None
        in_blocks = isinstance(checkpoint, Outline) and checkpoint.in_blocks
        if (outlined and in_blocks) or (weight is not None and len(weight.shape) == 3):
            return blocks(algorithm, outputs, inputs)
        if not plain and (outlined or weight is not None):
            return signed(algorithm, outputs, inputs)
    return parts(algorithm, outputs, inputs)


def _check_shape(
    checkpoint: Checkpoint | Outline, layer: str, info: TensorInfo, expected: tuple[int, int]
) -> None:
    if not isinstance(checkpoint, Checkpoint):
        return
    shape = tuple(int(n) for n in checkpoint.array(info.name))
    if shape != expected:
        raise CheckpointError(
            f"{info.file}: tensor {quoted(info.name)} says {list(shape)}, but by config.json {layer} has "
            f"{list(expected)}; the files are of different models"
        )


def joined(layers: Mapping[str, StoredLinear]) -> list[tuple[tuple[str, ...], StoredLinear]]:
    """Layers of the same input, joined where possible.

    Layers whose tensors are adjacent in the file become one layer. Its outputs follow the order of the names. A scale
    of which a layer has only one must be equal in all of them.
    """
    runs, waiting = [], sorted(layers, key=lambda name: layers[name].weight.offset)
    while waiting:
        for count in range(len(waiting), 0, -1):
            whole = _as_one([layers[name] for name in waiting[:count]])
            if whole is not None:
                runs.append((tuple(waiting[:count]), whole))
                waiting = waiting[count:]
                break
    return runs


def _as_one(layers: Sequence[StoredLinear]) -> StoredLinear | None:
    first, *others = layers
    whole: dict[str, Any] = {}
    if any(layer.weight.shape[0] % first.algorithm.group_rows for layer in layers[:-1]):
        return None  # a block of the first layer's scales would reach into the next
    one = math.prod(first.scale.shape) == 1 and not first.algorithm.group_size
    for name in (field.name for field in fields(first) if others):
        values = [getattr(layer, name) for layer in layers]
        if not all(isinstance(value, TensorInfo) for value in values):
            if any(value != values[0] for value in values):
                return None
        elif name in ("weight", "zero_point", "zero_term") or (name == "scale" and not one):
            whole[name] = adjacent(values)
            if whole[name] is None:
                return None
        elif not all(same_bytes(values[0], value) for value in values):
            return None
    return replace(first, **whole)


def stored_experts(
    checkpoint: Checkpoint | Outline, layers: Sequence[str], inputs: int, outputs: int
) -> list[StoredLinear] | None:
    """One linear layer of every expert, whose tensors begin with `layers`; None if they are in floating point.

    Raises CheckpointError as `stored_linear` does, and if an expert is stored differently from the first one.
    """
    experts = [stored_linear(checkpoint, layer, inputs, outputs) for layer in layers]
    first = _form(experts[0])
    for layer, stored in zip(layers, experts, strict=True):
        if (form := _form(stored)) != first:
            names = [name for name in form | first if form.get(name) != first.get(name)]
            weights = [name for name in names if name in WEIGHTS]
            differing = (weights or names)[0]
            both = [tensors.get(differing, "not there") for tensors in (form, first)]
            raise CheckpointError(
                f"{checkpoint.directory}: {layer}.{differing} is {both[0]}, but {layers[0]}.{differing} is {both[1]}; "
                "the experts of a layer must be stored alike: quantize again, all of them or none"
            )
    return [stored for stored in experts if stored is not None] or None


def _form(stored: StoredLinear | None) -> dict[str, str]:
    """The properties that stacked layers must share, by the last part of the tensor's name."""
    if stored is None:
        return {"weight": "in floating point"}
    form = {}
    for info in stored.tensors:
        one = math.prod(info.shape) == 1
        form[info.name.rpartition(".")[2]] = (
            f"{info.dtype} {'[]' if one else [n for n in info.shape if n > 1]}"
        )
    algorithm = stored.algorithm
    group = f" of {algorithm.group_size}" if algorithm.group_size else ""
    form[stored.weight.name.rpartition(".")[2]] += f" in {algorithm.name}{group}"
    return form


def _expect(
    checkpoint: Checkpoint | Outline,
    algorithm: Algorithm,
    layer: str,
    suffix: str,
    form: Form,
) -> TensorInfo:
    shapes, dtypes = form
    name, path = f"{layer}.{suffix}", checkpoint.quantization.path
    info = checkpoint.tensors.get(name)
    if info is None and isinstance(checkpoint, Checkpoint):
        raise CheckpointError(
            f"{checkpoint.directory}: has no tensor {quoted(name)}, but by {path.name} {layer} is {algorithm.name}, "
            "which needs it; quantize or fetch the checkpoint again"
        )
    if info is not None and (info.shape not in shapes or info.dtype not in dtypes):
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{info.file}: tensor {quoted(name)} is {info.dtype} {list(info.shape)}, but in {algorithm.name} it is "
            f"{', '.join(dtypes)} {expected} ({path.name}); quantize or fetch the checkpoint again"
        )
    return checkpoint.expect(name, shapes[0] if info is None else info.shape, dtypes)


def quantized_layers(checkpoint: Checkpoint | Outline) -> Iterator[tuple[str, Algorithm, TensorInfo]]:
    """The linear layers that are not in floating point, each with its weight."""
    for info in list(checkpoint.tensors.values()) if isinstance(checkpoint, Checkpoint) else ():
        layer = weight_name(info.name)
        if layer is None or info.dtype in FLOAT_DTYPES:
            continue
        if (algorithm := algorithm_of(checkpoint, layer)) is not None:
            yield layer, algorithm, info


def shape_of(
    checkpoint: Checkpoint | Outline, algorithm: Algorithm, layer: str, weight: TensorInfo
) -> tuple[int, int]:
    """The outputs and inputs of a quantized layer, from the shape of its weight."""
    shape = (*weight.shape, 1, 1)[: max(len(weight.shape), 2)]  # of a malformed one something to compare with
    if not is_integer(algorithm):
        return shape[0], shape[1] * FORMATS[algorithm.scheme].numbers_in_byte
    layout = _layout(algorithm, weight, checkpoint.tensors.get(f"{layer}.weight_scale"))
    return INTEGERS[layout].shape(shape, integer_bits(algorithm))


def _layout(algorithm: Algorithm, weight: TensorInfo, scale: TensorInfo | None) -> FileLayout:
    if not is_integer(algorithm) or weight.dtype == "I32":
        return algorithm.layout
    if len(weight.shape) == 3:
        return "blocks"
    pairs = weight.dtype == "U8" and scale is not None and scale.shape[:1] == (2 * weight.shape[0],)
    return "row_pairs" if pairs else "signed"


def number_formats(checkpoint: Checkpoint | Outline) -> set[str]:
    return {algorithm.scheme for _, algorithm, _ in quantized_layers(checkpoint)}
