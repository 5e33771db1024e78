"""A graph as a list of calls of torch's operators.

What depends on weights alone is computed as the graph is loaded. What depends on the shapes of a pass is computed by
the first pass of these shapes, on the host. The rest is a `Program`: the same calls on the same memory in every pass,
without a number of the host, as a CUDA graph needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnx_ir as ir
import torch
from dflash_plugins.packed import PackedWeight
from onnx_ir.passes import common
from onnx_ir.tensor_adapters import to_torch_dtype

from dflash_trt.engines.torch import kernels, packed
from dflash_trt.engines.torch.layers import MOST_EXPERTS
from dflash_trt.engines.torch.operators import HOST, OPERATORS
from dflash_trt.engines.torch.weights import PIECE_BYTES, PIECES, WeightFiles
from dflash_trt.errors import BundleError
from dflash_trt.graph.torch import DOMAIN, VERSION

Tensor = torch.Tensor
_PLACING = "PlaceHeads", "ProductHeads"


@dataclass(frozen=True, slots=True)
class Node:
    """An operator with names of its inputs and outputs. An absent input has no name. `host`: the inputs that are
    numbers of the host.
    """

    operator: str
    attributes: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]
    host: Sequence[int] = ()


def _called(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    results = OPERATORS[node.operator](node.attributes, *inputs)
    return results if isinstance(results, tuple | list) else (results,)


@dataclass(frozen=True, slots=True)
class Signature:
    """An input or an output of a graph; a dimension is a number or the name of one."""

    dtype: torch.dtype
    shape: Sequence[int | str]


class Graph:
    """A model of the dialect `torch`. Its weights are on `device`."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        shared: MutableMapping[Any, Tensor] | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """`shared`: weights of another graph, by their place in a file; both graphs then hold those that they share
        once. `alone`: whether a row must not depend on the others, so that products are those of our kernel, if any.
        """
        self.path, self.device = path, device
        self._shared = WeakValueDictionary() if shared is None else shared
        model = ir.load(path)
        if model.opset_imports.get(DOMAIN, VERSION) != VERSION:
            raise BundleError(
                f"{path}: has version {model.opset_imports[DOMAIN]} of the operators of torch, and this version of "
                f"dflash-trt runs {VERSION}; build the bundle again"
            )
        for key in [key for key in model.functions if key[1] in OPERATORS]:
            del model.functions[key]  # its calls are operators here
        if model.functions:
            common.InlinePass()(model)
        common.CommonSubexpressionEliminationPass()(model)
        self.inputs = {str(v.name): _signature(v) for v in model.graph.inputs}
        self.outputs = {str(v.name): _signature(v) for v in model.graph.outputs}
        nodes = [self._node(node) for node in model.graph]
        self.known: dict[str, Tensor] = {}  # numbers of the host
        self.weights: dict[str, Any] = {}  # tensors, or as they are stored (packed.py)
        self.nodes = self._folded(nodes, model.graph.initializers)
        self.nodes = self._added(self._fused(self._uncast(self.nodes)))
        if alone:
            self.nodes = [self._multiplied(node) for node in self.nodes]
        self.nodes = self._placing(self.nodes)
        self._uploaded: dict[str, Tensor] = {}

    def _node(self, node: ir.Node) -> Node:
        if node.op_type not in OPERATORS:
            raise BundleError(
                f"{self.path}: has the operator {node.domain}::{node.op_type}, which this version of dflash-trt does "
                "not run by torch; build the bundle again"
            )
        inputs = ["" if value is None else str(value.name) for value in node.inputs]
        while inputs and not inputs[-1]:
            inputs.pop()
        outputs = [str(value.name) for value in node.outputs]
        attributes = {name: _attribute(attribute) for name, attribute in node.attributes.items()}
        return Node(node.op_type, attributes, inputs, outputs, HOST.get(node.op_type, ()))

    def _folded(self, nodes: Sequence[Node], initializers: Mapping[str, ir.Value]) -> list[Node]:
        """Compute what needs no input of the graph. Returns the other nodes. Weights are read when they are needed, for
        a few nodes at a time, and freed when nothing needs them any more.
        """
        left = Counter(name for node in nodes for name in node.inputs)
        left.update(self.outputs.keys())
        tensors = {name: value.const_value for name, value in initializers.items()}
        external = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, ir.ExternalTensor)}
        files, constant, kept, folded = WeightFiles(self.path, self.device), set(tensors), [], []
        for node in nodes:
            if constant.issuperset(name for name in node.inputs if name):
                constant.update(node.outputs)
                folded.append(node)
            else:
                kept.append(node)

        def read(nodes: Sequence[Node]) -> None:
            names = {name for node in nodes for name in node.inputs if name in tensors}
            new = [name for name in external if name in names and name not in self.weights]
            self.weights.update(zip(new, self._read(files, [external[name] for name in new]), strict=True))
            for name in names - external.keys() - self.known.keys():
                self.known[name] = _tensor(tensors[name])

        for part in _parts(folded, {name: tensor.nbytes for name, tensor in external.items()}):
            read(part)
            for node in part:
                present = [name for name in node.inputs if name]
                inputs = [
                    None if not name else self.weights[name] if name in self.weights else self.known[name]
                    for name in node.inputs
                ]
                on_device = any(name in self.weights for name in present)
                results = _called(node, self._arguments(node, inputs, on_device=on_device))
                (self.weights if on_device and node.operator != "Shape" else self.known).update(
                    zip(node.outputs, results, strict=False)
                )
                left.subtract(present)
                for name in present:
                    if left[name] == 0:
                        self.weights.pop(name, None)
        read(kept)
        self.weights = {name: _compact(weight) for name, weight in self.weights.items() if left[name]}
        files.close()
        return kept

    def _uncast(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, without casts to float32 of outputs: a runner's copy to its buffer is one, and the choice of the
        largest needs none.
        """
        read = {name for node in nodes if node.operator != "BlockAcceptance" for name in node.inputs}
        return [
            replace(node, operator="Identity")
            if node.operator == "Cast"
            and node.outputs[0] in self.outputs.keys() - read
            and self.outputs[node.outputs[0]].dtype == torch.float32
            else node
            for node in nodes
        ]

    def _fused(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, where a norm or a gate also rounds its rows for the product after it, or multiplies a router."""
        made_by = {n.outputs[-1]: n for n in nodes if n.operator in ("AddNorm", "Gate")}
        constants, both, left = {*self.weights, *self.known}, dict[str, Node](), list[Node]()
        for node in nodes:
            before = (
                made_by.get(node.inputs[0]) if node.inputs and constants.issuperset(node.inputs[1:]) else None
            )
            joined = before and self._joined(before, node, nodes)
            if before is None or joined is None:
                left.append(node)
            else:
                both[made_by.pop(node.inputs[0]).outputs[-1]] = joined
        return [both.get(node.outputs[-1], node) if node.outputs else node for node in left]

    def _joined(self, before: Node, node: Node, nodes: Sequence[Node]) -> Node | None:
        """Both as one; None if they are not. A router's logits must be for nothing but the choice of experts."""
        operator, more, names = before.operator, node.attributes, node.inputs[1:]
        if operator == "AddNorm" and node.operator == "Router":
            readers = {n.operator: n.attributes for n in nodes if node.outputs[0] in n.inputs}
            if readers.keys() not in ({"MXFP4Experts"}, {"Route"}):
                return None
            ((reader, chosen),) = readers.items()
            operator, names = "NormRouter", [f"{node.outputs[0]}/counter", *names]
            self.weights[names[0]] = torch.zeros(1, dtype=torch.int32, device=self.device)
            more = {"k": chosen["k"], "arranged": reader == "MXFP4Experts"}
        elif node.operator != "QuantizedRows":
            return None
        attributes, outputs = {**before.attributes, **more}, [*before.outputs, *node.outputs]
        return Node(operator, attributes, [*before.inputs, *names], outputs, before.host)

    def _added(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, where a norm also adds the experts of its rows, if nothing else reads their sum."""
        read = Counter([*self.outputs, *(name for node in nodes for name in node.inputs)])
        sums = {node.inputs[1] for node in nodes if node.operator == "AddNorm" and read[node.inputs[1]] == 1}
        return [
            replace(node, attributes={**node.attributes, "apart": 1})
            if node.operator == "MXFP4Experts" and sums.issuperset(node.outputs)
            else node
            for node in nodes
        ]

    def _multiplied(self, node: Node) -> Node:
        """The node, for our kernels if there are any and it is a product with a weight."""
        if node.operator != "Gemm" or not isinstance(weight := self.weights.get(node.inputs[1]), Tensor):
            return node
        if kernels.of(weight) is None:
            return node
        if weight.dtype == torch.float32 and len(weight) <= MOST_EXPERTS:
            return replace(node, operator="Router")
        x, name, *bias = node.inputs
        ours = f"{name} of a product"  # other nodes may read it, too
        if ours not in self.weights:
            self.weights[ours] = packed.plain(weight)
        return replace(node, inputs=[x, ours, *bias])

    def _placing(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, where a product by our kernels places its heads itself, if nothing else reads it."""
        read = Counter([*self.outputs, *(name for node in nodes for name in node.inputs)])
        products = {
            node.outputs[0]: node
            for node in nodes
            if node.operator in ("Gemm", "ScaledProduct")
            and isinstance(self.weights.get(node.inputs[1]), PackedWeight)
            and read[node.outputs[0]] == 1
        }

        def joined(node: Node) -> Node:
            before = products.get(node.inputs[0]) if node.operator == "PlaceHeads" else None
            if before is None:
                return node
            x, weight, *more = before.inputs
            factor, bias = [*([""] if before.operator == "Gemm" else []), *more, ""][:2]
            inputs, attributes = (
                [x, weight, bias, factor, *node.inputs[1:]],
                {**before.attributes, **node.attributes},
            )
            return Node("ProductHeads", attributes, inputs, node.outputs, HOST["ProductHeads"])

        placed = {node.inputs[0] for node in nodes if node.operator == "PlaceHeads"} & products.keys()
        return [joined(node) for node in nodes if placed.isdisjoint(node.outputs)]

    @property
    def tiles(self) -> list[str]:
        """What the bits of products depend on: tiles, and whether torch multiplies the many rows of prompts."""
        held = [w for w in self.weights.values() if isinstance(w, PackedWeight)]
        made = {layer for w in held if (layer := kernels.of(w.codes)) is not None}
        by_torch = {form for layer in made for (form, _), pays in layer.prompts.items() if pays}
        return sorted({f"{w.form} {w.tile}{', prompts by torch' * (w.form in by_torch)}" for w in held})

    def _read(self, files: WeightFiles, tensors: Sequence[Any]) -> list[Tensor]:
        """Weights, of which those that are held already are not read again."""
        keys = [
            (tensor.location, tensor.offset, tensor.dtype, tuple(map(int, tensor.shape)))
            for tensor in tensors
        ]
        found = {key: self._shared[key] for key in keys if key in self._shared}
        new = {key: tensor for key, tensor in zip(keys, tensors, strict=True) if key not in found}
        found.update(zip(new, files.read(list(new.values())), strict=True))
        self._shared.update(found)
        return [found[key] for key in keys]

    def _arguments(self, node: Node, inputs: Sequence[Tensor | None], *, on_device: bool) -> list[Any]:
        """Numbers of the host as lists where an operator wants them, and on the device beside tensors there."""
        arguments: list[Any] = []
        for i, x in enumerate(inputs):
            if x is None:
                arguments.append(None)
            elif i in node.host:
                arguments.append(x.tolist())
            else:
                arguments.append(x.to(self.device) if on_device else x)
        return arguments

    def opens(self, caches: Iterable[str]) -> bool:
        """Whether a node reads a cache itself, and not by an operator for caches."""
        names = set(caches)
        for node in self.nodes:
            opened = names.intersection(node.inputs)
            if opened and node.operator not in (*_PLACING, "Attend", "WriteRows", "Shape"):
                return True
            if node.operator in (*_PLACING, "WriteRows"):
                kinds = node.attributes.get("kinds", "k")
                names.update(name for kind, name in zip(kinds, node.outputs, strict=False) if kind != "q")
        return False

    def close(self) -> None:
        """Free the weights."""
        for values in (self.weights, self.known, self._uploaded):
            values.clear()

    def on_device(self, name: str) -> Tensor:
        """A number of the host that does not depend on shapes, on the device."""
        if name not in self._uploaded:
            self._uploaded[name] = self.known[name].to(self.device)
        return self._uploaded[name]

    def first_pass(
        self, feeds: Mapping[str, Tensor], wanted: Collection[str] | None = None, *, prompt: bool = False
    ) -> tuple[Program, dict[str, Tensor]]:
        """Run a pass. Returns the program for its shapes, and the pass's outputs. `wanted`: those that are computed;
        None: all. `prompt`: whether it reads one, as `packed.linear` wants to know.
        """
        known, values, numbers = dict(self.known), list[Any](), dict[str, int]()
        steps, computed = list[_Step](), set[str]()
        asked = self.outputs if wanted is None else wanted
        nodes = [
            replace(node, attributes={**node.attributes, "prompt": prompt})
            for node in _needed(self.nodes, asked)
        ]
        left = Counter([*asked, *(name for node in nodes for name in node.inputs)])

        def number(name: str, value: Any) -> int:
            """The place of a value, which is new."""
            numbers[name] = len(values)
            values.append(value)
            return numbers[name]

        def place(name: str) -> int:
            if name in numbers:
                return numbers[name]
            if not name or name in self.weights:
                return number(name, self.weights[name] if name else None)
            return number(name, self.on_device(name) if name in self.known else known[name].to(self.device))

        def end(node: Node) -> None:
            """Free what no later node reads, as the passes after this one do."""
            left.subtract(node.inputs)
            for name in computed.intersection((*node.inputs, *node.outputs)):
                if not left[name]:
                    values[numbers[name]] = None

        for name, fed in feeds.items():
            number(name, fed)
        for node in nodes:
            present = [name for name in node.inputs if name]
            if node.operator == "Shape":
                known[node.outputs[0]] = _called(node, [values[place(present[0])]])[0]
                end(node)
                continue
            if known.keys() >= set(present):
                found = _called(
                    node, self._arguments(node, [known.get(n) for n in node.inputs], on_device=False)
                )
                known.update(zip(node.outputs, found, strict=False))
                continue
            fixed = {
                i: known[node.inputs[i]].tolist()
                for i in node.host
                if i < len(node.inputs) and node.inputs[i]
            }
            inputs = [
                number(f"{node.outputs[0]}:{i}", fixed[i]) if i in fixed else place(name)
                for i, name in enumerate(node.inputs)
            ]
            found = _called(node, [values[i] for i in inputs])
            outputs = [number(name, value) for name, value in zip(node.outputs, found, strict=False)]
            steps.append(_Step(OPERATORS[node.operator], node.attributes, inputs, outputs, ()))
            computed.update(name for name in node.outputs if name in numbers)
            end(node)
        results = {name: place(name) for name in asked}
        made_outputs = {name: values[i] for name, i in results.items()}
        feeds_at, of_pass = {name: numbers[name] for name in feeds}, {numbers[name] for name in computed}
        for i in {*of_pass, *feeds_at.values()}:
            values[i] = None
        return Program(_with_ends(steps, of_pass, results.values()), values, feeds_at, results), made_outputs


@dataclass(frozen=True, slots=True)
class _Step:
    """A call: places of its inputs and outputs, and of the values that nothing reads after it."""

    function: Any
    attributes: Mapping[str, Any]
    inputs: Sequence[int]
    outputs: Sequence[int]
    ended: Sequence[int]


class Program:
    """The calls of a pass of one set of shapes. `constants`: the values by place, None where a pass computes them."""

    def __init__(
        self,
        steps: Sequence[_Step],
        constants: Sequence[Any],
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
    ) -> None:
        self._steps, self._constants, self._inputs, self._outputs = steps, constants, inputs, outputs

    def __call__(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a pass. Its outputs are new tensors, or the caches that it wrote."""
        values = list(self._constants)
        for name, place in self._inputs.items():
            values[place] = feeds[name]
        for step in self._steps:
            results = step.function(step.attributes, *[values[i] for i in step.inputs])
            if isinstance(results, tuple | list):
                for place, value in zip(step.outputs, results, strict=False):
                    values[place] = value
            else:
                values[step.outputs[0]] = results
            for place in step.ended:
                values[place] = None
        return {name: values[place] for name, place in self._outputs.items()}


def _needed(nodes: Sequence[Node], outputs: Iterable[str]) -> list[Node]:
    """The nodes that these outputs depend on, in their order."""
    read, needed = set(outputs), list[Node]()
    for node in reversed(nodes):
        if not read.isdisjoint(node.outputs):
            read.update(node.inputs)
            needed.append(node)
    return needed[::-1]


def _with_ends(steps: Sequence[_Step], computed: set[int], results: Iterable[int]) -> list[_Step]:
    """The steps with the values that end with each of them, so that their memory is free for the next one."""
    seen, ended = set(results), list[_Step]()
    for step in reversed(steps):
        ends = tuple({i for i in (*step.inputs, *step.outputs) if i in computed and i not in seen})
        seen.update(ends)
        ended.append(_Step(step.function, step.attributes, step.inputs, step.outputs, ends))
    return ended[::-1]


def _parts(nodes: Sequence[Node], sizes: Mapping[str, int]) -> Iterator[list[Node]]:
    """The nodes in parts that read enough weights to keep the threads busy that read them. sizes: in bytes, by name."""
    part, size = list[Node](), 0
    for node in nodes:
        part.append(node)
        size += sum(sizes.get(name, 0) for name in node.inputs)
        if size >= PIECES * PIECE_BYTES:
            yield part
            part, size = [], 0
    yield part


def _compact(weight: Any) -> Any:
    """A tensor with memory of its own, if it is a part of another one or lies otherwise."""
    if not isinstance(weight, Tensor):
        return weight
    part = weight.untyped_storage().nbytes() > weight.nbytes
    return (
        weight.clone(memory_format=torch.contiguous_format) if part or not weight.is_contiguous() else weight
    )


def _tensor(tensor: Any) -> Tensor:
    array = tensor.numpy()
    if tensor.dtype == ir.DataType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _attribute(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        return _tensor(attribute.value)
    return attribute.value


def _signature(value: ir.Value) -> Signature:
    assert value.shape is not None
    assert value.dtype is not None
    shape = [n if isinstance(n, int) else str(n.value) for n in value.shape]
    return Signature(to_torch_dtype(value.dtype), shape)
