"""A quantized linear layer as a checkpoint stores it: one representation for all formats, checked when it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_trt.checkpoint.tensors import Checkpoint, Outline, TensorInfo, adjacent, same_bytes
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.formats import FORMATS, Algorithm, NumberFormat
from dflash_trt.formats.base import FLOAT_DTYPES, ONE, Form


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """The tensors of a quantized linear layer [out, in]. Scales multiply the values of the codes.

    weight, scale: see the format's `forms`.
    global_scale: one number that multiplies every scale.
    by_row: whether the numbers in a byte are neighbours in a row; otherwise they are neighbours in a column.
    input_scale: one number for the activations. None with quantized activations: every row has its own scale.
    pre_quant_scale: [in], multiplies the input first (AWQ).
    """

    algorithm: Algorithm
    weight: TensorInfo
    scale: TensorInfo
    global_scale: TensorInfo | None
    input_scale: TensorInfo | None
    pre_quant_scale: TensorInfo | None
    by_row: bool = True

    @property
    def format(self) -> NumberFormat:
        return FORMATS[self.algorithm.scheme]

    @property
    def in_blocks(self) -> bool:
        """Whether the weight is in the blocks that ONNX Runtime multiplies (`NumberFormat.block_forms`)."""
        return len(self.weight.shape) == 3

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
    algorithm = checkpoint.quantization.algorithm(layer)
    weight = checkpoint.tensors.get(f"{layer}.weight")
    if algorithm is None or (weight is not None and weight.dtype in FLOAT_DTYPES):
        return None
    kind, group = FORMATS[algorithm.scheme], algorithm.group_size
    if group and inputs % group:
        raise CheckpointError(
            f"{checkpoint.quantization.path}: {layer} is {algorithm.name} in groups of {group}, but has {inputs} inputs"
        )
    if kind.even_rows and outputs % 2:
        raise CheckpointError(
            f"{checkpoint.quantization.path}: {layer} is {algorithm.name}, but has {outputs} outputs"
        )

    def tensor(suffix: str, form: Form) -> TensorInfo:
        return _expect(checkpoint, algorithm, layer, suffix, form)

    def optional(suffix: str, form: Form) -> TensorInfo | None:
        return tensor(suffix, form) if f"{layer}.{suffix}" in checkpoint.tensors else None

    in_blocks = kind.integer_bits is not None and (
        len(weight.shape) == 3
        if weight is not None
        else isinstance(checkpoint, Outline) and checkpoint.in_blocks
    )
    forms = kind.block_forms(outputs, inputs) if in_blocks else kind.forms(algorithm, outputs, inputs)
    found = {suffix: tensor(suffix, form) for suffix, form in forms.items()}
    input_scale = None
    if algorithm.static:
        input_scale = tensor("input_scale", Form(ONE, ["F32"]))
    elif algorithm.activations:
        input_scale = optional("input_scale", Form(ONE, ["F32"]))
    return StoredLinear(
        algorithm,
        found["weight"],
        found["weight_scale"],
        found.get("weight_scale_2"),
        input_scale,
        optional("pre_quant_scale", Form([(inputs,)], FLOAT_DTYPES)),
        by_row=found["weight"].shape[0] == outputs,
    )


def joined(layers: Mapping[str, StoredLinear]) -> list[tuple[tuple[str, ...], StoredLinear]]:
    """Layers of the same input, joined where possible.

    Layers whose tensors are adjacent in the file become one layer. Its outputs follow the order of the names. A scale
    of which a layer has only one must be equal in all of them.
    """
    found, waiting = [], sorted(layers, key=lambda name: layers[name].weight.offset)
    while waiting:
        for count in range(len(waiting), 0, -1):
            whole = _as_one([layers[name] for name in waiting[:count]])
            if whole is not None:
                found.append((tuple(waiting[:count]), whole))
                waiting = waiting[count:]
                break
    return found


def _as_one(layers: Sequence[StoredLinear]) -> StoredLinear | None:
    first, *others = layers
    whole: dict[str, Any] = {}
    for name in (field.name for field in fields(first) if others):
        values = [getattr(layer, name) for layer in layers]
        if not all(isinstance(value, TensorInfo) for value in values):
            if any(value != values[0] for value in values):
                return None
        elif name == "weight" or (name == "scale" and values[0].nbytes > 4):
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
    found = [stored_linear(checkpoint, layer, inputs, outputs) for layer in layers]
    first = _form(found[0])
    for layer, stored in zip(layers, found, strict=True):
        if (form := _form(stored)) != first:
            names = [name for name in form | first if form.get(name) != first.get(name)]
            differing = "weight" if "weight" in names else names[0]
            said = [each.get(differing, "not there") for each in (form, first)]
            raise CheckpointError(
                f"{checkpoint.directory}: {layer}.{differing} is {said[0]}, but {layers[0]}.{differing} is {said[1]}; "
                "the experts of a layer must be stored alike: quantize again, all of them or none"
            )
    return [stored for stored in found if stored is not None] or None


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
    form["weight"] += f" in {algorithm.name}{f' of {algorithm.group_size}' if algorithm.group_size else ''}"
    return form


def widen(checkpoint: Checkpoint, stored: StoredLinear) -> NDArray[np.float32]:
    """The weight that the codes represent, float32 [out, in], without pre_quant_scale."""
    codes, scale = checkpoint.array(stored.weight.name), checkpoint.array(stored.scale.name)
    second = None if stored.global_scale is None else checkpoint.array(stored.global_scale.name)
    return stored.format.widen(codes, scale, second, by_row=stored.by_row)


def _expect(
    checkpoint: Checkpoint | Outline,
    algorithm: Algorithm,
    layer: str,
    suffix: str,
    form: Form,
) -> TensorInfo:
    shapes, dtypes = form
    name, path = f"{layer}.{suffix}", checkpoint.quantization.path
    found = checkpoint.tensors.get(name)
    if found is None and isinstance(checkpoint, Checkpoint):
        raise CheckpointError(
            f"{checkpoint.directory}: has no tensor {quoted(name)}, but by {path.name} {layer} is {algorithm.name}, "
            "which needs it; quantize or fetch the checkpoint again"
        )
    if found is not None and (found.shape not in shapes or found.dtype not in dtypes):
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{found.file}: tensor {quoted(name)} is {found.dtype} {list(found.shape)}, but in {algorithm.name} it is "
            f"{', '.join(dtypes)} {expected} ({path.name}); quantize or fetch the checkpoint again"
        )
    return checkpoint.expect(name, shapes[0] if found is None else found.shape, dtypes)


def widened_bytes(checkpoint: Checkpoint | Outline) -> int:
    """Bytes of the checkpoint's quantized linear layers in float32, without experts."""
    numbers_in_byte = {"F8_E4M3": 1, "I8": 1, "U8": 2}
    return 4 * sum(
        info.nbytes * numbers_in_byte.get(info.dtype, 0)
        for info in checkpoint.tensors.values()
        if info.name.endswith(".weight") and ".experts." not in info.name
    )


def number_formats(checkpoint: Checkpoint | Outline) -> set[str]:
    """The number formats of the checkpoint's linear layers."""
    stored = checkpoint.tensors if isinstance(checkpoint, Checkpoint) else ()
    algorithms = {
        checkpoint.quantization.algorithm(name.removesuffix(".weight_scale"))
        for name in stored
        if name.endswith(".weight_scale")
    }
    return {algorithm.scheme for algorithm in algorithms if algorithm is not None}
