"""A thin layer over onnx_ir: nodes with path-like names, shared constants, weights that stay on disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dflash_trt.checkpoint.tensors import DTYPES, TensorInfo

OPSET = 24
DFLASH_DOMAIN = "dflash"
DFLASH_VERSION = 1

FLOAT, BOOL, INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64

# By the names of compute dtypes, and by the dtype names of safetensors. Those of E8M0 are exponents + 127.
COMPUTE = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16, "fp32": FLOAT}
ONNX_DTYPES = {name: ir.DataType.from_numpy(dtype) for name, dtype in DTYPES.items()}
ONNX_DTYPES["F8_E8M0"] = ir.DataType.UINT8


class GraphBuilder:
    """Collect nodes into one `onnx_ir.Graph`.

    Names of nodes and values are paths. Inside `with g.scope("layers.3"):` an op named "q_proj" becomes
    `<graph name>/layers.3/q_proj`. Weights are cast to `dtype`.
    """

    def __init__(
        self, name: str, *, dtype: ir.DataType = FLOAT, opsets: dict[str, int] | None = None
    ) -> None:
        self.dtype = dtype
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET} | (opsets or {}), name=name)
        self.functions: dict[str, ir.Function] = {}
        self._outermost = self.graph
        self._scopes = [name]
        self._used: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._weights: dict[tuple[str, str], ir.Value] = {}

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put a name in front of those of all nodes inside."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    def body(self, name: str) -> GraphBuilder:
        """A builder for a subgraph, such as a Loop body. Its operands may come from outside; its constants do."""
        inner = copy(self)
        inner.graph = ir.Graph([], [], nodes=[], name=self._path(name))
        inner._scopes = [*self._scopes, name]
        return inner

    def _path(self, name: str) -> str:
        path = "/".join([*self._scopes, name])
        n = self._used.get(path, 0)
        self._used[path] = n + 1
        return path if n == 0 else f"{path}.{n}"

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Declare an input of the graph."""
        value = ir.val(name, dtype, shape)
        self.graph.inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> None:
        """Declare a value an output of the graph, under a name of its own."""
        value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
        self.graph.outputs.append(value)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        name: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Append a node with one output and return that output."""
        return self.multi(op_type, *inputs, outputs=1, name=name, domain=domain, **attributes)[0]

    def multi(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: int,
        name: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        """Append a node with several outputs."""
        path = self._path(name or op_type)
        node = ir.node(
            op_type, list(inputs), attributes=attributes, domain=domain, num_outputs=outputs, name=path
        )
        for i, value in enumerate(node.outputs):
            value.name = path if outputs == 1 else f"{path}:{i}"
        self.graph.append(node)
        return tuple(node.outputs)

    def constant(self, value: Any, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        """A small constant as an initializer; equal constants are stored once."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.Tensor(array, name=f"{self._scopes[0]}/constants/{len(self._constants)}")
            self._constants[key] = ir.val(tensor.name, const_value=tensor)
            self._outermost.register_initializer(self._constants[key])
        return self._constants[key]

    def scalar(self, value: float, dtype: ir.DataType | None = None) -> ir.Value:
        """A number in `dtype`, by default the graph's."""
        return self.constant(value, (dtype or self.dtype).numpy())

    def raw_weight(self, info: TensorInfo, folder: str) -> ir.Value:
        """The tensor in its safetensors file (`folder/` in the bundle): external data, no copy."""
        key = (folder, info.name)
        if key not in self._weights:
            tensor = ir.ExternalTensor(
                str(PurePosixPath(folder) / info.file.name),
                info.offset,
                info.nbytes,
                ONNX_DTYPES[info.dtype],
                shape=ir.Shape(info.shape),
                name=f"{folder}/{info.name}",
            )
            self._weights[key] = ir.val(tensor.name, const_value=tensor)
            self._outermost.register_initializer(self._weights[key])
        return self._weights[key]

    def reinterpret(self, weight: ir.Value, dtype: ir.DataType, shape: Sequence[int]) -> ir.Value:
        """The bytes of a raw weight as another dtype and shape."""
        tensor = weight.const_value
        assert isinstance(tensor, ir.ExternalTensor)
        weight.const_value = ir.ExternalTensor(
            *(tensor.location, tensor.offset, tensor.length, dtype), shape=ir.Shape(shape), name=tensor.name
        )
        weight.type, weight.shape = ir.TensorType(dtype), ir.Shape(shape)
        return weight

    def cast(self, value: ir.Value, dtype: ir.DataType, name: str = "cast") -> ir.Value:
        """A value in `dtype`; nothing is added where it has that already."""
        return value if value.dtype == dtype else self.op("Cast", value, name=name, to=int(dtype))

    def from_dtype(self, value: ir.Value, dtype: ir.DataType, name: str = "from_dtype") -> ir.Value:
        """Cast a value that is in `dtype` to the graph's dtype."""
        return value if dtype == self.dtype else self.op("Cast", value, name=name, to=int(self.dtype))

    def to_float(self, value: ir.Value) -> ir.Value:
        """Cast a computed value from the graph's dtype to float32, unless it is known to be in it."""
        if FLOAT in (self.dtype, value.dtype):
            return value
        return self.op("Cast", value, name="to_float", to=int(FLOAT))

    def slice(
        self,
        value: ir.Value,
        first: ir.Value | int,
        end: ir.Value | int,
        *,
        axis: int,
        name: str | None = None,
    ) -> ir.Value:
        """Entries first .. end-1 of one axis. A bound is a number or int64 [1]; a negative one counts from the end."""
        bounds = [self.constant([n]) if isinstance(n, int) else n for n in (first, end)]
        return self.op("Slice", value, *bounds, self.constant([axis]), name=name)

    def dim(self, value: ir.Value, axis: int, name: str = "dim") -> ir.Value:
        """Length of one axis, int64 [1]."""
        return self.op("Shape", value, name=name, start=axis, end=axis + 1)

    def unsqueeze(self, value: ir.Value, *axes: int) -> ir.Value:
        """The value with axes of length 1 at these places of the result."""
        return self.op("Unsqueeze", value, self.constant(list(axes)), name="unsqueeze")

    def shape(self, *dims: ir.Value | int) -> ir.Value:
        """A shape tensor from int64 [1] values and numbers."""
        parts = [self.constant([d]) if isinstance(d, int) else d for d in dims]
        return self.op("Concat", *parts, name="shape", axis=0)

    def arange(self, length: ir.Value) -> ir.Value:
        """0 .. length-1 as int64; `length` is int64 [1]."""
        zero, one = self.constant(0), self.constant(1)
        return self.op("Range", zero, self.op("Squeeze", length, name="scalar"), one, name="arange")

    def call(
        self, function: ir.Function, *inputs: ir.Value | None, outputs: int = 1, name: str, **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Call a `dflash::` operator. Its body becomes part of the model."""
        self.functions.setdefault(function.name, function)
        return self.multi(
            function.name, *inputs, outputs=outputs, name=name, domain=function.domain, **attributes
        )

    def function(self, attributes: Sequence[ir.Attr] = ()) -> ir.Function:
        """The collected graph as a function of the `dflash` domain, under the builder's name."""
        # A function has no initializers, so its constants become Constant nodes.
        for initializer in list(self.graph.initializers.values()):
            node = ir.node("Constant", [], attributes={"value": initializer.const_value}, num_outputs=1)
            node.name = node.outputs[0].name = initializer.name
            self.graph.insert_before(self.graph[0], node)
            initializer.replace_all_uses_with(node.outputs[0])
        self.graph.initializers.clear()
        return ir.Function(DFLASH_DOMAIN, self._scopes[0], graph=self.graph, attributes=attributes)

    def model(self) -> ir.Model:
        """The collected graph, with the bodies of the operators it calls."""
        self.graph.opset_imports[DFLASH_DOMAIN] = DFLASH_VERSION
        for function in self.functions.values():
            self.graph.opset_imports.update(function.opset_imports)
        functions = list(self.functions.values())
        return ir.Model(self.graph, ir_version=11, producer_name="dflash-trt", functions=functions)
