"""A place in a checkpoint, for a graph: tensors by name, linear layers in any storage format, norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear, joined, stored_linear
from dflash_trt.checkpoint.rules import CACHE_SCALES
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, TensorInfo
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.graph.builder import FLOAT, ONNX_DTYPES, GraphBuilder
from dflash_trt.graph.dialect import Dialect, Norm, Product, apart, normed
from dflash_trt.graph.quantized import QuantizedLinear


class Module:
    """A place in a checkpoint. It adds its prefix to tensor names and checks shape and dtype of each tensor used."""

    def __init__(
        self, g: GraphBuilder, checkpoint: Checkpoint | Outline, folder: str, dialect: Dialect
    ) -> None:
        self.g, self.checkpoint, self.folder, self.dialect = g, checkpoint, folder, dialect
        self.prefix, self._zero_centred = "", False
        self.used: set[str] = set()
        self.outside = g  # weights are prepared in the graph, also for a subgraph

    def at(self, prefix: str) -> Module:
        """The place `prefix` below this one."""
        below = copy(self)
        below.prefix = f"{self.prefix}{prefix}."
        return below

    def centred(self, there: bool) -> Module:
        """The same place, whose norms scale by 1 + weight, also if `there`."""
        place = copy(self)
        place._zero_centred |= there
        return place

    def inside(self, body: GraphBuilder) -> Module:
        """The same place, for a subgraph of the graph. Weights stay outside, so that they are prepared once."""
        there = copy(self)
        there.g = body
        return there

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor. An outline has only those that were asked for before."""
        return self.prefix + name in self.checkpoint.tensors

    def ignore(self, name: str) -> None:
        """Count a tensor as used, if there is one."""
        self.used.add(self.prefix + name)

    def raw(self, name: str, *shape: int, dtypes: Sequence[str] = FLOAT_DTYPES) -> ir.Value:
        """The tensor as stored."""
        return self.g.raw_weight(self.stored(name, *shape, dtypes=dtypes), self.folder)

    def stored(self, name: str, *shape: int, dtypes: Sequence[str] = FLOAT_DTYPES) -> TensorInfo:
        """The place of a tensor, which has this shape and one of these dtypes."""
        info = self.checkpoint.expect(self.prefix + name, shape, dtypes)
        self.used.add(info.name)
        return info

    def dtype_of(self, name: str) -> ir.DataType:
        """The dtype of a tensor that was used before."""
        return ONNX_DTYPES[self.checkpoint.tensors[self.prefix + name].dtype]

    def weight(self, name: str, *shape: int, dtype: ir.DataType | None = None) -> ir.Value:
        """The tensor in `dtype`, by default the graph's. It stays as it is on disk if it already has that dtype."""
        return self.outside.cast(self.raw(name, *shape), dtype or self.g.dtype, name=f"{name}/cast")

    def linear(self, x: ir.Value, name: str, inputs: int, outputs: int, *, bias: bool = False) -> ir.Value:
        """x [rows, inputs] -> [rows, outputs], in the graph's dtype. A quantized weight is multiplied as stored."""
        stored = stored_linear(self.checkpoint, self.prefix + name, inputs, outputs)
        if stored is not None:
            return self._quantized(x, name, stored, self.weight(f"{name}.bias", outputs) if bias else None)
        parameters = [self.weight(f"{name}.weight", outputs, inputs)]
        if bias:
            parameters.append(self.weight(f"{name}.bias", outputs))
        return self.g.op("Gemm", x, *parameters, name=name, transB=1)

    def router(self, x: ir.Value, name: str, inputs: int, outputs: int, *, bias: bool = False) -> ir.Value:
        """x [rows, inputs] -> [rows, outputs] in float32, by a layer that is not quantized."""
        weight = self.weight(f"{name}.weight", outputs, inputs, dtype=FLOAT)
        added = self.weight(f"{name}.bias", outputs, dtype=FLOAT) if bias else None
        return self.dialect.router(self.g, x, weight, added, name)

    def linears(
        self, x: ir.Value, outputs: Mapping[str, int], inputs: int, *, bias: bool = False
    ) -> list[ir.Value]:
        """x [rows, inputs] through each layer that `outputs` names."""
        found = apart(self.g, self.products(x, outputs, inputs, bias=bias), outputs)
        return [found[name] for name in outputs]

    def products(
        self, x: ir.Value, outputs: Mapping[str, int], inputs: int, *, bias: bool = False
    ) -> list[Product]:
        """x [rows, inputs] through each layer that `outputs` names, where the dialect joins them (its `joins_`) in one
        product.
        """
        layers = {n: stored_linear(self.checkpoint, self.prefix + n, inputs, m) for n, m in outputs.items()}
        stored = {name: layer for name, layer in layers.items() if layer is not None}
        plain = {name: outputs[name] for name in outputs if name not in stored}
        products: list[Product] = []
        for names, layer in joined(stored) if self.dialect.joins_quantized and not bias else ():
            if len(names) > 1:
                self.used.update(info.name for name in names for info in stored[name].tensors)
                products.append((names, self._quantized(x, "-".join(names), layer, None)))
        if self.dialect.joins_floats and len(plain) > 1:
            products.append((tuple(plain), self._joined(x, plain, inputs, bias=bias)))
        done = {name for names, _ in products for name in names}
        return products + [
            ((name,), self.linear(x, name, inputs, n, bias=bias))
            for name, n in outputs.items()
            if name not in done
        ]

    def _joined(self, x: ir.Value, outputs: Mapping[str, int], inputs: int, *, bias: bool) -> ir.Value:
        """One product with the weights of several layers, one below the other: folded as the graph is loaded."""
        name, shapes = "-".join(outputs), {"weight": (inputs,)} | ({"bias": ()} if bias else {})
        parameters = []
        for kind, columns in shapes.items():
            parts = [self.raw(f"{layer}.{kind}", n, *columns) for layer, n in outputs.items()]
            if len({part.dtype for part in parts}) > 1:
                parts = [self.outside.cast(part, self.g.dtype) for part in parts]
            whole = self.outside.op("Concat", *parts, name=f"{name}.{kind}", axis=0)
            parameters.append(
                self.outside.from_dtype(whole, parts[0].dtype or self.g.dtype, name=f"{name}.{kind}/cast")
            )
        return self.g.op("Gemm", x, *parameters, name=name, transB=1)

    def _quantized(self, x: ir.Value, name: str, stored: StoredLinear, bias: ir.Value | None) -> ir.Value:
        self.used.update(info.name for info in stored.tensors)
        layer = QuantizedLinear(name=name, stored=stored, folder=self.folder, bias=bias)
        return self.dialect.quantized_linear(self.g, x, layer)

    def norm(self, name: str | None, size: int, epsilon: float) -> Norm:
        """An RMSNorm over `size` numbers. `name`: of its weights; None: it has none."""
        g = self.g
        if name is None:
            return Norm(g.constant(np.ones(size), g.dtype.numpy()), epsilon)
        if not self._zero_centred:
            return Norm(self.weight(f"{name}.weight", size), epsilon, name)
        # The sum of 1 and a small weight has more digits than a dtype of 16 bits.
        weight = self.weight(f"{name}.weight", size, dtype=FLOAT)
        scale = self.outside.op("Add", weight, g.constant(1, np.float32), name=f"{name}.scale")
        scale.type = ir.TensorType(FLOAT)
        return Norm(scale, epsilon, name)

    def rms_norm(self, x: ir.Value, name: str | None, size: int, epsilon: float) -> ir.Value:
        """`norm` over the last axis of x."""
        return normed(self.g, x, self.norm(name, size, epsilon))

    def add_norm(
        self, x: ir.Value, y: ir.Value | None, name: str, size: int, epsilon: float
    ) -> tuple[ir.Value, ir.Value]:
        """The residual sum x + y [rows, size], where there is something to add, and its `norm`."""
        norm = self.norm(name, size, epsilon)
        return (x, normed(self.g, x, norm)) if y is None else self.dialect.add_norm(self.g, x, y, norm)

    def check_all_used(self, ignored: tuple[str, ...] = (), skipped: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError if a tensor is unused: then the checkpoint does not match its config.

        skipped: prefixes of tensors that may stay unused.
        """
        cache_scales(self.checkpoint, self.used | set(ignored), skipped)


def cache_scales(
    checkpoint: Checkpoint | Outline, used: Collection[str], skipped: tuple[str, ...] = ()
) -> list[str]:
    """The scales of an FP8 cache, the only tensors that may stay unused beside idle ones and those with the prefixes
    `skipped`.

    Caches are in the compute dtype, because TensorRT's KVCacheUpdate needs it. Raises CheckpointError for any other.
    """
    left = sorted(set(checkpoint.tensors) - set(used))
    left = [name for name in left if not name.startswith(skipped) and not _idle(checkpoint, name)]
    ending = CACHE_SCALES if checkpoint.quantization.kv_cache else ()
    if unknown := [name for name in left if not name.endswith(ending)]:
        raise CheckpointError(
            f"{checkpoint.directory}: {len(unknown)} tensors are not part of the architecture that config.json "
            f"describes: {', '.join(unknown[:4])}{', ...' if len(unknown) > 4 else ''}"
        )
    return left


def _idle(checkpoint: Checkpoint | Outline, name: str) -> bool:
    """Whether a tensor changes nothing: frequencies that old files have saved, or zeros that GPTQ adds as a bias."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    layer, _, end = name.rpartition(".")
    if end != "bias" or isinstance(checkpoint, Outline) or checkpoint.codes(layer) is None:
        return False
    return not checkpoint.array(name).any()
