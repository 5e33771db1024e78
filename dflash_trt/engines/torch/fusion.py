"""Join the operators between the products of a layer and after the head, which our kernels compute in one step each.

On a CPU, and where a kernel does not compile, a joined operator makes the calls that it stands for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_BY_HEAD = (0, 2, 1, 3)


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


def fused(nodes: Sequence[Node], results: Collection[str]) -> list[Node]:
    """The same graph with fewer nodes. `results`: the values that it gives. A Cast that nothing reads may stay."""
    graph = _Graph(nodes, results)
    for node in nodes:
        match node.operator:
            case "Add":
                _add_norm(graph, node)
            case "Gemm":
                _place_heads(graph, node)
                _gate(graph, node)
                _router(graph, node)
            case "Attend":
                _attend(graph, node)
            case "LogSoftmax":
                _best_token(graph, node)
    return graph.in_order()


class _Graph:
    def __init__(self, nodes: Sequence[Node], results: Collection[str]) -> None:
        self._nodes = {id(node): node for node in nodes}
        self._place = {id(node): i for i, node in enumerate(nodes)}
        self._users = defaultdict[str, list[Node]](list)
        for node in nodes:
            for name in dict.fromkeys(node.inputs):
                self._users[name].append(node)
        self._makers = {name: node for node in nodes for name in node.outputs}
        self._results = frozenset(results)

    def users(self, name: str, operator: str | None = None) -> list[Node]:
        """The nodes that read a value, of any operator or of one."""
        there = (node for node in self._users[name] if id(node) in self._nodes)
        return [node for node in there if operator in (None, node.operator)]

    def only(self, name: str, operator: str) -> Node | None:
        """The one node that reads a value, if it is of this operator and nothing else needs the value."""
        users = self.users(name)
        return (
            users[0]
            if len(users) == 1 and users[0].operator == operator and name not in self._results
            else None
        )

    def maker(self, name: str, operator: str) -> Node | None:
        """The node that computes a value, if it is of this operator."""
        node = self._makers.get(name)
        return node if node is not None and node.operator == operator and id(node) in self._nodes else None

    def put(self, node: Node, *instead: Node) -> None:
        """This node in the place of others, where the last of them was."""
        for each in instead:
            del self._nodes[id(each)]
        self._nodes[id(node)] = node
        self._place[id(node)] = max(self._place[id(each)] for each in instead)
        for name in dict.fromkeys(node.inputs):
            self._users[name].append(node)
        self._makers |= dict.fromkeys(node.outputs, node)

    def in_order(self) -> list[Node]:
        """Each node after those that make its inputs, and else where it was."""
        done, ordered = set[int](), list[Node]()

        def add(node: Node) -> None:
            if id(node) in done:
                return
            done.add(id(node))
            for name in node.inputs:
                if name in self._makers:
                    add(self._makers[name])
            ordered.append(node)

        for node in sorted(self._nodes.values(), key=lambda node: self._place[id(node)]):
            add(node)
        return ordered


def _add_norm(graph: _Graph, add: Node) -> None:
    """Add, then RMSNormalization."""
    norms = graph.users(add.outputs[0], "RMSNormalization")
    if norms and norms[0].inputs[0] == add.outputs[0] and norms[0].attributes.get("axis", -1) == -1:
        norm = norms[0]
        joined = Node(
            "AddNorm", norm.attributes, [*add.inputs, norm.inputs[1]], [*add.outputs, *norm.outputs]
        )
        graph.put(joined, add, norm)


def _gate(graph: _Graph, gemm: Node) -> None:
    """A product that is split in two: Swish of the first half times the second."""
    split = graph.only(gemm.outputs[0], "Split")
    if split is None or len(split.outputs) != 2:
        return
    gate, value = split.outputs
    swish, product = graph.only(gate, "Swish"), graph.only(value, "Mul")
    if swish is None or product is None or graph.only(swish.outputs[0], "Mul") is not product:
        return
    joined = Node("Gate", {**swish.attributes, **split.attributes}, split.inputs, product.outputs, split.host)
    graph.put(joined, split, swish, product)


def _router(graph: _Graph, gemm: Node) -> None:
    """A product in float32 of numbers that were widened for it."""
    cast = graph.maker(gemm.inputs[0], "Cast")
    if cast is not None and cast.attributes["to"] == 1 and gemm.attributes.get("transB"):
        graph.put(replace(gemm, operator="Router", inputs=[cast.inputs[0], *gemm.inputs[1:]]), gemm)


def _attend(graph: _Graph, attend: Node) -> None:
    """Attention whose heads are put beside each other."""
    transposed = graph.only(attend.outputs[0], "Transpose")
    if transposed is not None and tuple(transposed.attributes["perm"]) == _BY_HEAD:
        attributes = {**attend.attributes, "by_row": 1}
        graph.put(replace(attend, attributes=attributes, outputs=transposed.outputs), attend, transposed)


def _best_token(graph: _Graph, softmax: Node) -> None:
    """The largest of LogSoftmax and ArgMax of the same numbers, which may have been widened for it."""
    (logits,) = softmax.inputs
    largest, best = graph.only(softmax.outputs[0], "ReduceMax"), graph.users(logits, "ArgMax")
    if largest is not None and best:
        cast = graph.maker(logits, "Cast")
        inputs = softmax.inputs if cast is None else cast.inputs
        joined = Node("BestToken", {}, inputs, [*best[0].outputs, *largest.outputs])
        graph.put(joined, softmax, best[0], largest)


@dataclass(frozen=True)
class _Heads:
    """What becomes of a part of a product: its shape's name, norm, rotation and place."""

    nodes: list[Node]
    shape: str
    result: str
    norm: Node | None
    rope: Node | None
    write: Node | None


def _place_heads(graph: _Graph, gemm: Node) -> None:
    """A product that is queries, keys, values or several of them, in this order."""
    split = graph.only(gemm.outputs[0], "Split")
    if split is not None and split.attributes.get("axis") != -1:
        return
    parts = [_heads(graph, name) for name in (gemm.outputs if split is None else split.outputs)]
    heads = [part for part in parts if part is not None]
    if len(heads) < len(parts) or not (kinds := _kinds(heads)):
        return
    ropes = [part.rope for part in heads if part.rope is not None]
    norms = [part.norm for part in heads if part.norm is not None]
    angles = ropes[0].inputs[1:] if ropes else ["", ""]
    writes = [part.write for part in heads if part.write is not None]
    starts = {write.inputs[2] for write in writes}
    same = all(r.inputs[1:] == angles and r.attributes == ropes[0].attributes for r in ropes)
    same &= all(norm.attributes == norms[0].attributes for norm in norms) and len(starts) <= 1
    # Either all of queries and keys are rotated, or none.
    same &= len(ropes) in (0, sum(kind != "v" for kind in kinds))
    if not same or any(
        kind == "v" and (part.norm or part.rope) for kind, part in zip(kinds, heads, strict=True)
    ):
        return
    by_kind = dict(zip(kinds, heads, strict=True))

    def of(kind: str, name: str, index: int) -> str:
        node = getattr(by_kind[kind], name) if kind in by_kind else None
        return "" if node is None else node.inputs[index]

    inputs = [gemm.outputs[0], *(by_kind[kind].shape if kind in by_kind else "" for kind in "qkv")]
    inputs += [of("q", "norm", 1), of("k", "norm", 1), *angles, *(starts or [""])]
    inputs += [of("k", "write", 0), of("v", "write", 0)]
    attributes = {**(norms[0].attributes if norms else {}), **(ropes[0].attributes if ropes else {})}
    joined = Node(
        "PlaceHeads",
        {**attributes, "kinds": "".join(kinds)},
        inputs,
        [part.result for part in heads],
        (1, 2, 3),
    )
    graph.put(joined, *([] if split is None else [split]), *(node for part in heads for node in part.nodes))


def _kinds(heads: Sequence[_Heads]) -> list[str]:
    """q, k or v of each part; empty if they are in no such order."""
    kinds = ["q" if part.write is None else "v" if part.rope is None else "k" for part in heads]
    if kinds in (["k"], ["v"], ["q"], ["k", "v"], ["q", "k"], ["q", "k", "v"]):
        return kinds
    # Without rotation, what is written first is the keys.
    if kinds in (["v", "v"], ["q", "v", "v"]):
        return ["k" if i == len(kinds) - 2 else kind for i, kind in enumerate(kinds)]
    return []


def _heads(graph: _Graph, name: str) -> _Heads | None:
    """Follow a value through Reshape, perhaps RMSNormalization, Transpose and perhaps RotaryEmbedding and WriteRows."""
    reshape = graph.only(name, "Reshape")
    if reshape is None:
        return None
    nodes, value = [reshape], reshape.outputs[0]

    def follow(operator: str) -> Node | None:
        nonlocal value
        node = graph.only(value, operator)
        if node is None or node.inputs[1 if operator == "WriteRows" else 0] != value:
            return None
        nodes.append(node)
        value = node.outputs[0]
        return node

    norm = follow("RMSNormalization")
    transpose = follow("Transpose")
    if transpose is None or tuple(transpose.attributes["perm"]) != _BY_HEAD:
        return None
    rope = follow("RotaryEmbedding")
    write = follow("WriteRows")
    return _Heads(nodes, reshape.inputs[1], value, norm, rope, write)
