"""The names and forms of a quantized layer's tensors in a file, by the layout of its algorithm.

plain      Model Optimizer's, and compressed-tensors' where a number has a byte to itself
packed     compressed-tensors' weight_packed: integers in words of 32 bits along the inputs, E2M1 in pairs
scale_inv  FP8 with weight_scale_inv, which multiplies in spite of its name
gptq       qweight: words along the inputs, transposed; every zero point less one. gptq_v2: zero points as they are
awq        qweight: words along the outputs, in an order of their own
blocks     GGUF's conversion (gguf_blocks.py): unsigned with a zero in their middle or at `zero_point`
row_pairs  Model Optimizer's INT4: two's complement, two rows in a byte
signed     two's complement by row, of four bits two columns in a byte

Engines read integers as `blocks` or as `signed`, which quantization/repack.py writes from any of these, and all other
numbers as the file has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_trt.formats import FORMATS, Algorithm
from dflash_trt.formats.base import BLOCK, FLOAT_DTYPES, ONE, FileLayout, Form
from dflash_trt.formats.numbers import Bytes, unpack_awq, unpack_rows, unpack_words

WORD = 32  # bits
# GGUF's types whose numbers ONNX Runtime's blocks hold: five bits take eight. Q6_K has a scale for each 16 numbers.
GGUF: Mapping[str, Algorithm] = {
    name: Algorithm(name, f"int{bits}", group_size=BLOCK, layout="blocks")
    for bits, names in ((4, ("Q4_0", "Q4_1", "Q4_K")), (8, ("Q8_0", "Q5_K")))
    for name in names
}
WEIGHTS = ("weight", "weight_packed", "qweight")  # the ends of names of weights
# The ends of tensors' names by the fields of StoredLinear; the first of several is the usual one.
_PLAIN = {
    "weight": ("weight",),
    "scale": ("weight_scale",),
    "global_scale": ("weight_scale_2",),
    "input_scale": ("input_scale",),
    "pre_quant_scale": ("pre_quant_scale",),
    "zero_point": ("weight_zero_point",),
    "zero_term": ("weight_zero_term",),
    "order": ("weight_order",),
}
_WORDS = {"weight": ("qweight",), "scale": ("scales",), "zero_point": ("qzeros",), "group_index": ("g_idx",)}
_NAMES: Mapping[FileLayout, Mapping[str, tuple[str, ...]]] = {
    "plain": _PLAIN,
    "blocks": _PLAIN,
    "scale_inv": _PLAIN
    | {"scale": ("weight_scale_inv", "weight_scale"), "input_scale": ("activation_scale", "input_scale")},
    "packed": {
        "weight": ("weight_packed",),
        "scale": ("weight_scale",),
        "global_scale": ("weight_global_scale",),
        "input_scale": ("input_global_scale",),
        "zero_point": ("weight_zero_point",),
        "group_index": ("weight_g_idx",),
        "shape": ("weight_shape",),
    },
    "gptq": _WORDS,
    "gptq_v2": _WORDS,
    "awq": _WORDS,
}


class IntegerLayout(NamedTuple):
    """How the integers of a layer [out, in] lie in a layout.

    shape: (out, in), from the shape of the weight and the bits of a number.
    codes: unsigned codes [rows, in] of rows i .. j-1 of the weight, from it, the bits, i and j. i is a multiple of 8.
    points: zero points [out, groups], from what the file has, and the bits.
    by_group: scales are [groups, out], instead of [out, groups].
    """

    shape: Callable[[Sequence[int], int], tuple[int, int]]
    codes: Callable[[NDArray[Any], int, int, int], Bytes]
    points: Callable[[NDArray[Any], int], Bytes] = lambda points, bits: points
    by_group: bool = False


_GPTQ = IntegerLayout(
    shape=lambda s, bits: (s[1], s[0] * WORD // bits),
    codes=lambda words, bits, i, j: unpack_words(words[:, i:j].T, bits),
    points=lambda words, bits: unpack_words(words, bits).T,
    by_group=True,
)
INTEGERS: Mapping[FileLayout, IntegerLayout] = {
    "signed": IntegerLayout(
        shape=lambda s, bits: (s[0], s[1] * 8 // bits),
        codes=lambda packed, bits, i, j: unpack_words(packed[i:j], bits) ^ np.uint8(1 << (bits - 1)),
    ),
    "row_pairs": IntegerLayout(
        shape=lambda s, bits: (2 * s[0], s[1]),
        codes=lambda packed, bits, i, j: unpack_rows(packed[i // 2 : j // 2]) ^ np.uint8(8),
    ),
    "blocks": IntegerLayout(
        shape=lambda s, bits: (s[0], s[1] * BLOCK),
        codes=lambda packed, bits, i, j: unpack_words(packed[i:j].reshape(j - i, -1), bits),
    ),
    "packed": IntegerLayout(
        shape=lambda s, bits: (s[0], s[1] * WORD // bits),
        codes=lambda words, bits, i, j: unpack_words(words[i:j], bits),
        points=lambda words, bits: unpack_words(words.T, bits).T,  # packed along the outputs
    ),
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": IntegerLayout(
        shape=lambda s, bits: (8 * s[1], s[0]),
        codes=lambda words, bits, i, j: unpack_awq(words[:, i // 8 : -(-j // 8)]).T[: j - i],
        points=lambda words, bits: unpack_awq(words).T,
        by_group=True,
    ),
}


class LayerTensor(NamedTuple):
    """A tensor of a layer: its possible names after the layer's, and its form."""

    names: tuple[str, ...]
    form: Form
    needed: bool = True


LayerTensors = Mapping[str, LayerTensor]


def weight_name(name: str) -> str | None:
    """The layer whose weight a tensor of this name may be."""
    layer, _, end = name.rpartition(".")
    return layer if layer and end in WEIGHTS else None


def weight_end(layout: FileLayout) -> str:
    return _NAMES[layout]["weight"][0]


def parts(algorithm: Algorithm, rows: int, columns: int) -> LayerTensors:
    """The tensors of a layer [rows, columns] as the file has them, by the fields of StoredLinear."""
    layout = algorithm.layout
    if layout == "blocks":
        return blocks(algorithm, rows, columns)
    in_words = is_integer(algorithm) and layout != "plain"
    forms = (_in_words if in_words else _as_numbers)(algorithm, rows, columns)
    optional = {"pre_quant_scale", "shape"} | ({"input_scale"} if not algorithm.static else set())
    if layout.startswith("gptq") and not algorithm.ordered:
        optional.add("group_index")
    names = _NAMES[layout]
    return {name: LayerTensor(names[name], form, name not in optional) for name, form in forms.items()}


def _as_numbers(algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
    """Codes and scales as their format has them."""
    fields = {"weight": "weight", "weight_scale": "scale", "weight_scale_2": "global_scale"}
    forms = FORMATS[algorithm.scheme].forms(algorithm, rows, columns)
    found = {fields[end]: form for end, form in forms.items()}
    if algorithm.activations:
        found["input_scale"] = Form(ONE, ("F32",) if algorithm.scheme == "nvfp4" else ("F32", "BF16", "F16"))
    if algorithm.layout == "plain":
        found["pre_quant_scale"] = Form([(columns,)], FLOAT_DTYPES)
    return found


def _in_words(algorithm: Algorithm, rows: int, columns: int) -> dict[str, Form]:
    bits, groups = integer_bits(algorithm), columns // algorithm.group_size
    in_rows, in_columns = rows * bits // WORD, columns * bits // WORD
    index = Form([(columns,)], ("I32",))
    if algorithm.layout == "packed":
        return {
            "weight": Form([(rows, in_columns)], ("I32",)),
            "scale": Form([(rows, groups)], FLOAT_DTYPES),
            "shape": Form([(2,)], ("I64", "I32")),
            **({"zero_point": Form([(in_rows, groups)], ("I32",))} if algorithm.zero_points else {}),
            **({"group_index": index} if algorithm.ordered else {}),
        }
    awq = algorithm.layout == "awq"
    return {
        "weight": Form([(columns, in_rows) if awq else (in_columns, rows)], ("I32",)),
        "scale": Form([(groups, rows)], ("F16", "BF16", "F32")),
        "zero_point": Form([(groups, in_rows)], ("I32",)),
        **({} if awq else {"group_index": index}),
    }


def blocks(algorithm: Algorithm, rows: int, columns: int) -> LayerTensors:
    """The tensors of a layer in `blocks`, where their scales may be those of larger groups."""
    count, groups = columns // BLOCK, {columns // BLOCK, columns // (algorithm.group_size or columns)}
    bits = dict.fromkeys((integer_bits(algorithm), 8))
    weight = Form([(rows, count, BLOCK * n // 8) for n in bits], ("U8",))
    return _rewritten(weight, [(rows, group) for group in sorted(groups, reverse=True)], columns)


def signed(algorithm: Algorithm, rows: int, columns: int) -> LayerTensors:
    """The tensors of a layer that is `signed`, whatever the checkpoint had."""
    weight = (
        Form([(rows, columns // 2)], ("U8",))
        if integer_bits(algorithm) == 4
        else Form([(rows, columns)], ("I8",))
    )
    return _rewritten(weight, [(rows, columns // (algorithm.group_size or columns))], columns)


def _rewritten(weight: Form, groups: list[tuple[int, int]], columns: int) -> LayerTensors:
    forms = {
        "weight": weight,
        "scale": Form(groups, ("F32", "BF16", "F16")),
        "zero_point": Form(groups, ("U8",)),
        "zero_term": Form(groups, ("F32",)),
        "order": Form([(columns,)], ("I64",)),
        "pre_quant_scale": Form([(columns,)], FLOAT_DTYPES),
    }
    return {
        name: LayerTensor(_PLAIN[name], form, name in ("weight", "scale")) for name, form in forms.items()
    }


def is_integer(algorithm: Algorithm) -> bool:
    return FORMATS[algorithm.scheme].integer_bits is not None


def integer_bits(algorithm: Algorithm) -> int:
    bits = FORMATS[algorithm.scheme].integer_bits
    assert bits is not None
    return bits
