"""Run a body of plugin nodes as TensorRT would: each node's kernel, with its plugin's grid and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from dflash_plugins import plugin_table
from dflash_plugins.plugin_table import versioned

from dflash_trt.graph.builder import DFLASH_DOMAIN
from tests.doubles.triton_interpreter import to_numpy

PLUGINS = {versioned(plugin.name): plugin for plugin in plugin_table.PLUGINS}
TORCH = {"FLOAT": torch.float32, "BF16": torch.bfloat16, "INT8": torch.int8}
TORCH |= {"INT32": torch.int32, "INT64": torch.int64}
NAMES = {dtype: name for name, dtype in TORCH.items()}


def run(
    function: ir.Function, inputs: Mapping[str, torch.Tensor], attributes: Mapping[str, Any], tile: Any = None
) -> list[torch.Tensor]:
    """The outputs of a function of plugin nodes and of the few other nodes that feed them."""
    values: dict[Any, Any] = {
        value: inputs[value.name or ""] for value in function.inputs if value.name in inputs
    }
    for node in function:
        arguments = [values[value] for value in node.inputs if value is not None]
        given = {
            name: attributes[a.ref_attr_name] if a.is_ref() else a.value
            for name, a in node.attributes.items()
        }
        if node.domain == DFLASH_DOMAIN:
            made = launch(node.op_type, arguments, given, tile)
        elif node.op_type == "Constant":
            made = [torch.from_numpy(np.array(given["value"].numpy().astype(np.float64)))]
            if given["value"].dtype in (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT):
                made = [torch.from_numpy(np.array(given["value"].numpy()))]
            elif given["value"].dtype == ir.DataType.BFLOAT16:
                made = [made[0].to(torch.bfloat16)]
        elif node.op_type == "Shape":
            made = [torch.tensor(arguments[0].shape[given.get("start", 0) : given.get("end")])]
        elif node.op_type == "Cast":
            to = {ir.DataType.INT32: torch.int32}[ir.DataType(given["to"])]
            made = [arguments[0].to(to)]
        elif node.op_type == "Identity":
            made = arguments
        elif node.op_type in ("TRT_KVCacheUpdate", "TensorScatter"):
            cache, rows, start = arguments
            made = [cache.clone()]
            for b, at in enumerate(start.tolist()):
                made[0][b, :, at : at + rows.shape[2]] = rows[b]
        else:
            assert node.op_type == "Expand"
            made = [arguments[0].expand(*arguments[1].tolist()).contiguous()]
        values.update(zip(node.outputs, made, strict=True))
    return [values[value] for value in function.outputs]


def launch(
    name: str, inputs: list[torch.Tensor], attributes: Mapping[str, Any], tile: Any = None
) -> list[torch.Tensor]:
    plugin = PLUGINS[name]
    assert len(inputs) == len(plugin.inputs)
    attributes = {key: attributes[key] for key in plugin.attributes}
    symbols = plugin_table.Symbols([tuple(t.shape) for t in inputs], lambda a, b: -(-a // b), min)
    outputs = [
        torch.empty(shape, dtype=inputs[kind].dtype if isinstance(kind, int) else TORCH[kind])
        for shape, kind in plugin.outputs(symbols, attributes)
    ]
    described = [SimpleNamespace(shape=t.shape, dtype=SimpleNamespace(name=NAMES[t.dtype])) for t in inputs]
    sizes = plugin_table.Sizes(name, described)
    if tile is None and plugin.tiles is not None:
        tile = plugin.tiles(sizes)[0]
    use = plugin.use(sizes, attributes, tile)
    kernel = getattr(import_module(f"dflash_plugins.kernels.{use.module}"), use.function)
    # The arguments of the compiled kernel's entry: in order, without constants, tuples flattened.
    passed: list[Any] = [*inputs, *plugin.integers(symbols, attributes), *outputs]
    flat: dict[str, Any] = {}
    for argument in (name for name in kernel.arg_names if name in use.types):
        kind = use.types[argument]
        if isinstance(kind, tuple):
            flat[argument] = tuple(passed.pop(0) for _ in kind)
        else:
            flat[argument] = passed.pop(0)
            assert isinstance(flat[argument], int) == (kind == "i32"), argument
            if kind == "*u8":
                flat[argument] = flat[argument].view(torch.uint8)
    assert not passed
    kernel[plugin.grid(symbols, attributes, tile)](**flat, **use.launch)
    return outputs


def arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays for ONNX's reference evaluator, which computes in float32."""
    found = {name: to_numpy(tensor) for name, tensor in tensors.items()}
    return {name: a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for name, a in found.items()}
