"""Make a graph for TensorRT executable by ONNX Runtime: its `trt::` operators become functions of standard ones.

The functions do what NVIDIA documents for the operators (onnx-tensorrt, docs/TRT_custom_ops.md), including lengths.
So the CPU computes what the bodies request from TensorRT.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.formats.numbers import E2M1, E4M3, E8M0, unpack_pairs
from tests.doubles.formats import unpack_blocks

STANDARD = helper.make_opsetid("", 24)


def executable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model for ONNX Runtime. Its weights must be loaded."""
    _dequantize(model.graph)
    _dequantize_nvfp4(model.graph)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            kept = [a for a in node.attribute if a.name != "TRT_decomposable"]
            del node.attribute[:]
            node.attribute.extend(kept)
    model.functions.extend(
        [_cache_update(), _attention(), _dynamic_quantize(), _in_blocks(), _dequantize_blocks()]
    )
    if all(opset.domain != "trt" for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid("trt", 1))
    return model


def _cache_update() -> onnx.FunctionProto:
    """output[i, :, indices[i] + s] = update[i, :, s]"""
    return helper.make_function(
        "trt",
        "TRT_KVCacheUpdate",
        ["cache", "update", "indices"],
        ["output"],
        [
            helper.make_node("Cast", ["indices"], ["at"], to=TensorProto.INT64),
            helper.make_node("TensorScatter", ["cache", "update", "at"], ["output"], axis=-2, mode="linear"),
        ],
        [STANDARD],
        attributes=["cache_mode"],
    )


def _attention() -> onnx.FunctionProto:
    """Attention with unscaled scores and a boolean mask. Keys and values beyond a sequence's length are absent."""

    def node(op: str, inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op, inputs, [output], **attributes)

    def constant(name: str, value: np.ndarray) -> onnx.NodeProto:
        return node("Constant", [], name, value=numpy_helper.from_array(value))

    return helper.make_function(
        "trt",
        "TRT_Attention",
        ["q", "k", "v", "mask", "query_lengths", "lengths"],
        ["y"],
        [
            constant("zero", np.array(0)),
            constant("one", np.array(1)),
            constant("axes", np.array([1, 2, 3])),
            node("Cast", ["lengths"], "ends", to=TensorProto.INT64),
            node("Unsqueeze", ["ends", "axes"], "ends4"),
            node("Shape", ["k"], "rows", start=2, end=3),
            node("Squeeze", ["rows"], "count"),
            node("Range", ["zero", "count", "one"], "slots"),
            node("Less", ["slots", "ends4"], "there"),
            node("And", ["mask", "there"], "visible"),
            node("Attention", ["q", "k", "v", "visible"], "y", scale=1.0),
        ],
        [STANDARD],
    )


def _dequantize_blocks() -> onnx.FunctionProto:
    """y = x * scale, one scale per block of the two axes. The last block of an axis may be smaller."""

    def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op, inputs.split(), [output], **attributes)

    def constant(name: str, value: object) -> onnx.NodeProto:
        return node("Constant", "", name, value=numpy_helper.from_array(np.array(value)))

    split = helper.make_node("Constant", [], ["block"])
    split.attribute.append(
        onnx.AttributeProto(name="value_ints", ref_attr_name="block_shape", type=onnx.AttributeProto.INTS)
    )
    cast = node("Cast", "exact", "y")
    cast.attribute.append(
        onnx.AttributeProto(name="to", ref_attr_name="output_dtype", type=onnx.AttributeProto.INT)
    )
    nodes = [split, constant("zero", [0]), constant("both", [0, 1])]
    for axis, size in enumerate(("rows", "columns")):
        nodes += [
            constant(f"{size}_axis", np.int64(axis)),
            constant(f"{size}_at", [axis]),
            node("Gather", f"block {size}_axis", f"{size}_block"),
            node("Shape", "x", f"{size}_count", start=axis, end=axis + 1),
            node("Squeeze", f"{size}_count", f"{size}_number"),
            constant(f"{size}_one", np.int64(1)),
            constant(f"{size}_from", np.int64(0)),
            node("Range", f"{size}_from {size}_number {size}_one", f"{size}_places"),
            node("Div", f"{size}_places {size}_block", f"{size}_index"),
        ]
    nodes += [
        node("Cast", "scale", "factors", to=TensorProto.FLOAT),
        node("Gather", "factors rows_index", "by_row", axis=0),
        node("Gather", "by_row columns_index", "by_place", axis=1),
        node("Cast", "x", "numbers", to=TensorProto.FLOAT),
        node("Mul", "numbers by_place", "exact"),
        cast,
    ]
    attributes = ["block_shape", "output_dtype"]
    return helper.make_function(
        "trt", "TRT_BlockDequantize", ["x", "scale"], ["y"], nodes, [STANDARD], attributes=attributes
    )


def _dequantize(graph: onnx.GraphProto) -> None:
    """MXFP4 and MXFP8 initializers as numbers. Scales are exponents, one per 32 elements of the last axis."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "TRT_MXFP8DequantizeLinear"]:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes.keys() == {"axis", "block_size", "output_dtype"}
        assert (attributes["axis"], attributes["block_size"]) == (-1, 32)
        blocks, scales = (stored[name] for name in node.input)
        assert scales.data_type == TensorProto.UINT8
        exponents = numpy_helper.to_array(scales)
        if blocks.data_type == TensorProto.FLOAT8E4M3FN:
            numbers = np.frombuffer(blocks.raw_data, E4M3).astype(np.float32).reshape(*exponents.shape, 32)
            values = (numbers * E8M0[exponents][..., None]).reshape(blocks.dims)
        else:
            assert blocks.data_type == TensorProto.FLOAT4E2M1
            values = unpack_blocks(
                np.frombuffer(blocks.raw_data, np.uint8).reshape(*exponents.shape, 16), exponents
            )
        assert list(values.shape) == list(blocks.dims)
        dtype = helper.tensor_dtype_to_np_dtype(attributes["output_dtype"])
        for tensor in (blocks, scales):
            graph.initializer.remove(tensor)
        graph.initializer.append(numpy_helper.from_array(values.astype(dtype), node.output[0]))
        graph.node.remove(node)


def _dequantize_nvfp4(graph: onnx.GraphProto) -> None:
    """E2M1 codes as float32 numbers, also in initializers, and their multiplication by a scale per 16 numbers."""
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT4E2M1:
            values = E2M1[unpack_pairs(np.frombuffer(tensor.raw_data, np.uint8))].reshape(tensor.dims)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for node in graph.node:
        block = [a.i for a in node.attribute if a.name == "block_size"]
        if node.op_type == "DequantizeLinear" and block == [16]:
            node.op_type, node.domain = "InBlocks", "trt"
            del node.attribute[:]


def _in_blocks() -> onnx.FunctionProto:
    """y = x * scale, one scale per 16 numbers of the last axis."""
    nodes = [
        helper.make_node("Constant", [], ["split"], value_ints=[-1, 16]),
        helper.make_node("Constant", [], ["column"], value_ints=[-1, 1]),
        helper.make_node("Reshape", ["x", "split"], ["blocks"]),
        helper.make_node("Reshape", ["scale", "column"], ["scales"]),
        helper.make_node("Mul", ["blocks", "scales"], ["scaled"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Reshape", ["scaled", "shape"], ["y"]),
    ]
    return helper.make_function("trt", "InBlocks", ["x", "scale"], ["y"], nodes, [STANDARD])


def _dynamic_quantize() -> onnx.FunctionProto:
    """Blocks of 16 along the last axis: scale = E4M3(largest / 6 / second), codes = E2M1(x / (scale * second))."""

    def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(op, inputs.split(), [output], **attributes)

    def constant(name: str, value: np.ndarray) -> onnx.NodeProto:
        return node("Constant", "", name, value=numpy_helper.from_array(value))

    middles = (E2M1[:7] + E2M1[1:8]) / 2
    return helper.make_function(
        "trt",
        "TRT_FP4DynamicQuantize",
        ["x", "second"],
        ["codes", "scales"],
        [
            constant("split", np.array([-1, 16])),
            constant("last", np.array([-1])),
            constant("six", np.float32(6)),
            constant("least", np.float32(2**-9)),
            constant("most", np.float32(448)),
            constant("middles", middles),
            constant("numbers", E2M1[:8]),
            node("Shape", "x", "shape"),
            node("Shape", "x", "outer", start=0, end=-1),
            node("Concat", "outer last", "scales_shape", axis=0),
            node("Reshape", "x split", "blocks"),
            node("Abs", "blocks", "magnitudes"),
            node("ReduceMax", "magnitudes last", "largest", keepdims=1),
            node("Div", "largest six", "sixth"),
            node("Div", "sixth second", "wanted"),
            node("Clip", "wanted least most", "clipped"),
            node("Cast", "clipped", "stored", to=TensorProto.FLOAT8E4M3FN),
            node("Reshape", "stored scales_shape", "scales"),
            node("Cast", "stored", "scale", to=TensorProto.FLOAT),
            node("Mul", "scale second", "step"),
            node("Div", "magnitudes step", "quotient"),
            node("Unsqueeze", "quotient last", "each"),
            node("Greater", "each middles", "above"),
            node("Cast", "above", "ones", to=TensorProto.INT64),
            node("ReduceSum", "ones last", "index", keepdims=0),
            node("Gather", "numbers index", "rounded"),
            node("Sign", "blocks", "sign"),
            node("Mul", "rounded sign", "signed"),
            node("Reshape", "signed shape", "codes"),
        ],
        [STANDARD],
        attributes=["axis", "block_size", "scale_type"],
    )
