"""The names and forms of a quantized layer's tensors in a file, by the layout of its algorithm; the role of any tensor.

plain      Model Optimizer's, and compressed-tensors' where a number has a byte to itself
packed     compressed-tensors' weight_packed: integers in words of 32 bits along the inputs, E2M1 in pairs
scale_inv  FP8 with weight_scale_inv, which multiplies in spite of its name
gptq       qweight: words along the inputs, transposed; every zero point less one. gptq_v2: zero points as they are
awq        qweight: words along the outputs, in an order of their own
blocks     GGUF's conversion (gguf_blocks.py)

`blocks` and `signed` are also what quantization/repack.py writes for an engine from any of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dflash_trt.formats import FORMATS, Algorithm
from dflash_trt.formats.base import BLOCK, EXPONENT_DTYPES, FLOAT_DTYPES, ONE, FileLayout, Form, Shape

if TYPE_CHECKING:
    from dflash_trt.checkpoint.rules import Quantization
    from dflash_trt.checkpoint.tensors import TensorInfo

WORD = 32  # bits
# GGUF's types whose numbers ONNX Runtime's blocks hold: five bits take eight. Q6_K has a scale for each 16 numbers.
GGUF: Mapping[str, Algorithm] = {
    name: Algorithm(name, f"int{bits}", group_size=BLOCK, layout="blocks")
    for bits, names in ((4, ("Q4_0", "Q4_1", "Q4_K")), (8, ("Q8_0", "Q5_K")))
    for name in names
}
WEIGHTS = ("weight", "weight_packed", "qweight")  # the ends of names of weights


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
    return {"gptq": "qweight", "gptq_v2": "qweight", "awq": "qweight", "packed": "weight_packed"}.get(
        layout, "weight"
    )


def parts(algorithm: Algorithm, rows: int, columns: int) -> LayerTensors:
    """The tensors of a layer [rows, columns] as the file has them, by the fields of StoredLinear."""
    if algorithm.layout == "packed":
        tensors = _packed(algorithm, rows, columns)
    elif algorithm.layout in ("gptq", "gptq_v2", "awq"):
        tensors = _words(algorithm, rows, columns)
    elif algorithm.layout == "blocks":
        return blocks(algorithm, rows, columns)
    else:
        tensors = _plain(algorithm, rows, columns)
    smooth = LayerTensor(("pre_quant_scale",), Form([(columns,)], FLOAT_DTYPES), needed=False)
    return tensors | ({"pre_quant_scale": smooth} if algorithm.layout == "plain" else {})


def _plain(algorithm: Algorithm, rows: int, columns: int) -> dict[str, LayerTensor]:
    fields = {"weight": "weight", "weight_scale": "scale", "weight_scale_2": "global_scale"}
    forms = FORMATS[algorithm.scheme].forms(algorithm, rows, columns)
    tensors = {fields[suffix]: LayerTensor((suffix,), form) for suffix, form in forms.items()}
    inputs: tuple[str, ...] = ("input_scale",)
    if algorithm.layout == "scale_inv":
        tensors["scale"] = LayerTensor(("weight_scale_inv", "weight_scale"), tensors["scale"].form)
        inputs = ("activation_scale", "input_scale")
    if algorithm.activations:
        dtypes = ("F32",) if algorithm.scheme == "nvfp4" else ("F32", "BF16", "F16")
        tensors["input_scale"] = LayerTensor(inputs, Form(ONE, dtypes), algorithm.static)
    return tensors


def _packed(algorithm: Algorithm, rows: int, columns: int) -> dict[str, LayerTensor]:
    if algorithm.scheme in ("nvfp4", "mxfp4"):
        scale = ("F8_E4M3",) if algorithm.scheme == "nvfp4" else EXPONENT_DTYPES
        tensors = {
            "weight": LayerTensor(("weight_packed",), Form([(rows, columns // 2)], ("U8",))),
            "scale": LayerTensor(("weight_scale",), Form([(rows, columns // algorithm.group_size)], scale)),
        }
        if algorithm.scheme == "nvfp4":
            tensors["global_scale"] = LayerTensor(("weight_global_scale",), Form(ONE, ("F32",)))
        if algorithm.activations:
            tensors["input_scale"] = LayerTensor(
                ("input_global_scale",), Form(ONE, ("F32",)), algorithm.static
            )
        return tensors
    bits, groups = integer_bits(algorithm), columns // algorithm.group_size
    tensors = {
        "weight": LayerTensor(("weight_packed",), Form([(rows, columns * bits // WORD)], ("I32",))),
        "scale": LayerTensor(("weight_scale",), Form([(rows, groups)], FLOAT_DTYPES)),
        "shape": LayerTensor(("weight_shape",), Form([(2,)], ("I64", "I32")), needed=False),
    }
    if algorithm.zero_points:
        tensors["zero_point"] = LayerTensor(
            ("weight_zero_point",), Form([(rows * bits // WORD, groups)], ("I32",))
        )
    if algorithm.ordered:
        tensors["group_index"] = LayerTensor(("weight_g_idx",), Form([(columns,)], ("I32",)))
    return tensors


def _words(algorithm: Algorithm, rows: int, columns: int) -> dict[str, LayerTensor]:
    bits, groups = integer_bits(algorithm), columns // algorithm.group_size
    awq = algorithm.layout == "awq"
    weight: Shape = (columns, rows * bits // WORD) if awq else (columns * bits // WORD, rows)
    tensors = {
        "weight": LayerTensor(("qweight",), Form([weight], ("I32",))),
        "scale": LayerTensor(("scales",), Form([(groups, rows)], ("F16", "BF16", "F32"))),
        "zero_point": LayerTensor(("qzeros",), Form([(groups, rows * bits // WORD)], ("I32",))),
    }
    if not awq:
        tensors["group_index"] = LayerTensor(("g_idx",), Form([(columns,)], ("I32",)), algorithm.ordered)
    return tensors


def blocks(algorithm: Algorithm, rows: int, columns: int) -> LayerTensors:
    """The tensors of a layer in blocks (StoredLinear.in_blocks), where their scales may be those of larger groups."""
    count, groups = columns // BLOCK, {columns // BLOCK, columns // (algorithm.group_size or columns)}
    bits = dict.fromkeys((integer_bits(algorithm), 8))
    shapes = [(rows, group) for group in sorted(groups, reverse=True)]
    weight = Form([(rows, count, BLOCK * each // 8) for each in bits], ("U8",))
    return {
        "weight": LayerTensor(("weight",), weight),
        "scale": LayerTensor(("weight_scale",), Form(shapes, ("F32", "BF16", "F16"))),
        "zero_point": LayerTensor(("weight_zero_point",), Form(shapes, ("U8",)), needed=False),
        "zero_term": LayerTensor(("weight_zero_term",), Form(shapes, ("F32",)), needed=False),
        **_rest(columns),
    }


def signed(algorithm: Algorithm, rows: int, columns: int) -> LayerTensors:
    """The tensors of a layer of integers in two's complement, by row, whatever the checkpoint had."""
    bits, groups = integer_bits(algorithm), columns // (algorithm.group_size or columns)
    codes = ("U8", (rows, columns // 2)) if bits == 4 else ("I8", (rows, columns))
    return {
        "weight": LayerTensor(("weight",), Form([codes[1]], (codes[0],))),
        "scale": LayerTensor(("weight_scale",), Form([(rows, groups)], ("F32", "BF16", "F16"))),
        "zero_term": LayerTensor(("weight_zero_term",), Form([(rows, groups)], ("F32",)), needed=False),
        **_rest(columns),
    }


def _rest(columns: int) -> dict[str, LayerTensor]:
    return {
        "order": LayerTensor(("weight_order",), Form([(columns,)], ("I64",)), needed=False),
        "pre_quant_scale": LayerTensor(("pre_quant_scale",), Form([(columns,)], FLOAT_DTYPES), needed=False),
    }


def integer_bits(algorithm: Algorithm) -> int:
    bits = FORMATS[algorithm.scheme].integer_bits
    assert bits is not None
    return bits


_ROLES = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".experts.", "experts"),
    ("shared_expert_gate", "router"),
    ("router", "router"),
    ("mlp.gate.", "router"),
    ("self_attn", "attention"),
    ("linear_attn", "attention"),
    (".mlp.", "mlp"),
    ("norm", "norm"),
    ("fc.", "fc"),
)


def role_of(name: str) -> str:
    """embedding, head, experts, router, attention, mlp, norm, fc (the drafter's fusion of taps) or other."""
    return next((role for part, role in _ROLES if part in name), "other")


# The ends of names of tensors that say how to read a weight.
_SCALES = (
    *("_scale", "_scale_2", "_scales", ".scales", ".weight_scale_inv"),
    *(".weight_zero_point", ".weight_zero_term", ".qzeros", ".weight_g_idx", ".g_idx", ".weight_order"),
    ".weight_shape",
)


def parameters_of(tensor: TensorInfo, quantization: Quantization | None = None) -> int:
    """Numbers in a tensor: two in a byte of MXFP4's blocks and of packed weights, none in their scales.

    Layers in the blocks that ONNX Runtime multiplies have BLOCK numbers in each. `quantization` says how many bits the
    integers in words have; without it they have four.
    """
    if tensor.name.endswith(_SCALES) and not tensor.name.endswith("router.per_expert_scale"):
        return 0
    if tensor.dtype == "I32":
        algorithm = None if quantization is None else quantization.algorithm(tensor.name.rpartition(".")[0])
        return tensor.nbytes * (1 if algorithm is not None and algorithm.scheme == "int8" else 2)
    in_bytes = tensor.dtype == "U8" and tensor.name.endswith((".weight", ".weight_packed"))
    if in_bytes and len(tensor.shape) == 3:
        return math.prod(tensor.shape[:2]) * BLOCK
    return math.prod(tensor.shape) * (2 if in_bytes or tensor.name.endswith("_blocks") else 1)
