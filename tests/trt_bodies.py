"""A graph for TensorRT as one that ONNX Runtime executes: its `trt::` operators as functions of standard ones.

The functions say what NVIDIA documents of the operators (onnx-tensorrt, docs/TRT_custom_ops.md), lengths included, so
that what is computed on a CPU is what the bodies ask TensorRT for.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.graph.experts import unpack_mxfp4

STANDARD = helper.make_opsetid("", 24)


def executable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model for ONNX Runtime; weights must have been loaded."""
    _dequantize(model.graph)
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            kept = [a for a in node.attribute if a.name != "TRT_decomposable"]
            del node.attribute[:]
            node.attribute.extend(kept)
    model.functions.extend([_cache_update(), _attention()])
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
    """Scores unscaled, a boolean mask, and keys and values beyond a sequence's length not there."""

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


def _dequantize(graph: onnx.GraphProto) -> None:
    """MXFP4 initializers as numbers: the scales' bytes are exponents, one for 32 elements of the last axis."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "TRT_MXFP8DequantizeLinear"]:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes.keys() == {"axis", "block_size", "output_dtype"}
        assert (attributes["axis"], attributes["block_size"]) == (-1, 32)
        blocks, scales = (stored[name] for name in node.input)
        assert (blocks.data_type, scales.data_type) == (TensorProto.FLOAT4E2M1, TensorProto.UINT8)
        exponents = numpy_helper.to_array(scales)
        packed = np.frombuffer(blocks.raw_data, np.uint8).reshape(*exponents.shape, 16)
        values = unpack_mxfp4(packed, exponents)
        assert list(values.shape) == list(blocks.dims)
        dtype = helper.tensor_dtype_to_np_dtype(attributes["output_dtype"])
        for tensor in (blocks, scales):
            graph.initializer.remove(tensor)
        graph.initializer.append(numpy_helper.from_array(values.astype(dtype), node.output[0]))
        graph.node.remove(node)
