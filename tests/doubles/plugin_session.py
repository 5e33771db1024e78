"""A graph with plugin nodes: ONNX Runtime runs what is between them, and Triton's interpreter their kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import helper

from dflash_trt.graph.builder import DFLASH_DOMAIN
from tests.doubles import plugin_graph
from tests.doubles.sessions import session


def plugin_session(model: onnx.ModelProto) -> Any:
    """A session of ONNX Runtime, or of parts of the graph with plugins between them."""
    has_plugins = any(node.domain == DFLASH_DOMAIN for node in model.graph.node)
    return _Session(model) if has_plugins else session(model)


class _Session:
    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        # Even parts have no plugins, and odd ones nothing else. A value's number is that of the part that makes it.
        self._parts = defaultdict[int, list[onnx.NodeProto]](list)
        made: dict[str, int] = {}
        for node in model.graph.node:
            part, is_plugin = (
                max((made.get(name, 0) for name in _read(node)), default=0),
                node.domain == DFLASH_DOMAIN,
            )
            part += part % 2 != is_plugin
            self._parts[part].append(node)
            made |= dict.fromkeys(node.output, part)
        self._sessions: dict[int, ort.InferenceSession] = {}

    def run(self, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        values = dict(feeds)
        for i in sorted(self._parts):
            for node in self._parts[i] if i % 2 else ():
                inputs = [torch.from_numpy(np.ascontiguousarray(values[name])) for name in node.input]
                made = plugin_graph.launch(node.op_type, inputs, {})
                values |= {name: each.numpy() for name, each in zip(node.output, made, strict=True)}
            if i % 2 == 0:
                part = self._sessions.get(i) or self._sessions.setdefault(i, self._session(i, values))
                given = {each.name: values[each.name] for each in part.get_inputs()}
                wanted = [each.name for each in part.get_outputs()]
                values |= dict(zip(wanted, part.run(wanted, given), strict=True))
        return [values[name] for name in names]

    def _session(self, i: int, values: Mapping[str, np.ndarray]) -> ort.InferenceSession:
        """Of one part, whose inputs have the types of these values."""
        nodes, graph = self._parts[i], self._model.graph
        read = dict.fromkeys(name for node in nodes for name in _read(node))
        wanted = {name for j, part in self._parts.items() if j != i for node in part for name in _read(node)}
        wanted |= {value.name for value in graph.output}
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim)
            for name, x in values.items()
            if name in read
        ]
        outputs = [onnx.ValueInfoProto(name=name) for node in nodes for name in node.output if name in wanted]
        stored = [tensor for tensor in graph.initializer if tensor.name in read]
        part = onnx.ModelProto()
        part.CopyFrom(self._model)
        part.graph.CopyFrom(helper.make_graph(nodes, f"part {i}", inputs, outputs, stored))
        return session(part)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """What a node and its bodies read, with some names of the bodies' own."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read(inner)
