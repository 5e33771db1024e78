"""BF16 on ONNX Runtime, whose processor kernels do not have it: float32 numbers, rounded after each operator.

So a graph for TensorRT in BF16 rounds where its tensors say so, and only a fused kernel's inner steps are finer.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

BF16, FLOAT = TensorProto.BFLOAT16, TensorProto.FLOAT
# Operators that move numbers, and so round none.
MOVES = {
    "Concat", "Expand", "Gather", "GatherElements", "Identity", "Reshape", "ScatterND", "Slice", "Split", "Squeeze",
}  # fmt: skip
MOVES |= {"TensorScatter", "Tile", "Transpose", "Unsqueeze", "Where", "Pad"}


def in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model without a tensor in BF16. Changes nothing where there is none."""
    if not _uses_bf16(model.graph):
        return model
    model = onnx.inliner.inline_local_functions(model)
    graph = model.graph
    del model.graph.value_info[:]
    types = {
        v.name: v.type.tensor_type.elem_type
        for v in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    types |= {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "output_dtype", "dtype") and attribute.i == BF16:
                attribute.i = FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == BF16:
                attribute.t.CopyFrom(_widened(attribute.t))
        nodes.append(node)
        if node.op_type in MOVES or node.op_type == "Constant" or node.domain == "com.microsoft":
            continue  # ONNX Runtime's own operators compute in float32
        for i, name in enumerate(node.output):
            if not name:
                continue
            if name not in types:
                raise TypeError(f"{node.op_type} {node.name}: no type of its output {name}")
            if types[name] == BF16:
                node.output[i] = f"{name}/exact"
                nodes += [
                    helper.make_node("Cast", [node.output[i]], [f"{name}/bf16"], to=BF16),
                    helper.make_node("Cast", [f"{name}/bf16"], [name], to=FLOAT),
                ]
    del graph.node[:]
    graph.node.extend(nodes)
    for tensor in graph.initializer:
        if tensor.data_type == BF16:
            tensor.CopyFrom(_widened(tensor))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == BF16:
            value.type.tensor_type.elem_type = FLOAT
    del graph.value_info[:]
    return model


def _uses_bf16(graph: onnx.GraphProto) -> bool:
    return any(v.type.tensor_type.elem_type == BF16 for v in (*graph.input, *graph.output)) or any(
        t.data_type == BF16 for t in graph.initializer
    )


def _widened(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)
