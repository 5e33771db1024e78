"""Run a body of plugin nodes as TensorRT would: each node's kernel, with its plugin's grid and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from dflash_plugins.kernel_specs import Use
from dflash_plugins.kernel_table import KERNELS
from dflash_plugins.launch import by_triton, call
from dflash_plugins.plugins import versioned

from dflash_trt.graph.builder import DFLASH_DOMAIN
from tests.doubles.triton_interpreter import to_numpy

PLUGINS = {versioned(kernel.name): kernel for kernel in KERNELS}


def run(
    function: ir.Function, inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Any], tile: Any = None
) -> list[torch.Tensor]:
    """The outputs of a function of plugin nodes and of the few other nodes that feed them."""
    values: dict[Any, Any] = {
        value: inputs[value.name or ""] for value in function.inputs if value.name in inputs
    }
    for node in function:
        arguments = [values[value] for value in node.inputs if value is not None]
        attrs = {
            name: attributes[a.ref_attr_name] if a.is_ref() else a.value
            for name, a in node.attributes.items()
        }
        if node.domain == DFLASH_DOMAIN:
            outputs = launch(node.op_type, arguments, attrs, tile)
        elif node.op_type == "Constant":
            outputs = [torch.from_numpy(np.array(attrs["value"].numpy().astype(np.float64)))]
            if attrs["value"].dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT):
                outputs = [torch.from_numpy(np.array(attrs["value"].numpy()))]
            elif attrs["value"].dtype == ir.DataType.BFLOAT16:
                outputs = [outputs[0].to(torch.bfloat16)]
        elif node.op_type == "Shape":
            outputs = [torch.tensor(arguments[0].shape[attrs.get("start", 0) : attrs.get("end")])]
        elif node.op_type == "Cast":
            to = {ir.DataType.INT32: torch.int32}[ir.DataType(attrs["to"])]
            outputs = [arguments[0].to(to)]
        elif node.op_type == "Identity":
            outputs = arguments
        elif node.op_type in ("TRT_KVCacheUpdate", "TensorScatter"):
            cache, rows, start = arguments
            outputs = [cache.clone()]
            for b, at in enumerate(start.tolist()):
                outputs[0][b, :, at : at + rows.shape[2]] = rows[b]
        else:
            assert node.op_type == "Expand"
            outputs = [arguments[0].expand(*arguments[1].tolist()).contiguous()]
        values.update(zip(node.outputs, outputs, strict=True))
    return [values[value] for value in function.outputs]


def launch(
    name: str, inputs: list[torch.Tensor], attributes: Mapping[str, Any], tile: Any = None
) -> list[torch.Tensor]:
    """Integers of one byte are signed in TensorRT, and what a kernel has as a tuple are inputs of their own."""
    kernel = PLUGINS[name]
    inputs = [x.view(torch.uint8) if x.dtype == torch.int8 else x for x in inputs]

    def run(use: Use, grid: tuple[int, ...], **arguments: Any) -> None:
        several = {n: tuple(inputs) for n, kind in use.types.items() if isinstance(kind, tuple)}
        by_triton(use, grid, **arguments | several)

    assert attributes.keys() >= kernel.attributes.keys()
    values = {key: attributes[key] for key in kernel.attributes}
    return [*call(run, kernel, *inputs, tile=tile, **values).values()]


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays for ONNX's reference evaluator, which computes in float32."""
    found = {name: to_numpy(tensor) for name, tensor in tensors.items()}
    return {name: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for name, a in found.items()}
