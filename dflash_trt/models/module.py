"""A place in a checkpoint, for a graph: tensors by name, linear layers in any storage format, norms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.linears import StoredLinear, joined, stored_linear
from dflash_trt.checkpoint.rules import CACHE_SCALES
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, TensorInfo
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.graph.builder import FLOAT, ONNX_DTYPES, GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.quantized import QuantizedLinear

Shaped = Callable[[ir.Value, int], ir.Value]


class Module:
    """A place in a checkpoint. It adds its prefix to tensor names and checks shape and dtype of each tensor used."""

    def __init__(
        self, g: GraphBuilder, checkpoint: Checkpoint | Outline, folder: str, dialect: Dialect
    ) -> None:
        self.g, self.checkpoint, self.folder, self.dialect = g, checkpoint, folder, dialect
        self.prefix, self._zero_centred = "", False
        self.used: set[str] = set()
        self._outside = g  # weights are prepared in the graph, also for a subgraph

    def at(self, prefix: str) -> Module:
        """The place `prefix` below this one."""
        below = copy(self)
        below.prefix = f"{self.prefix}{prefix}."
        return below

    def centred(self) -> Module:
        """The same place, whose norms scale by 1 + weight."""
        there = copy(self)
        there._zero_centred = True
        return there

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
        return self._outside.cast(self.raw(name, *shape), dtype or self.g.dtype, name=f"{name}/cast")

    def linear(
        self,
        x: ir.Value,
        name: str,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """x [rows, inputs] -> [rows, outputs]. x is in `dtype`, by default the graph's.

        A quantized weight is multiplied in its stored format. A layer with its own `dtype` cannot be quantized.
        """
        stored = (
            stored_linear(self.checkpoint, self.prefix + name, inputs, outputs) if dtype is None else None
        )
        if stored is not None:
            return self._quantized(x, name, stored, self.weight(f"{name}.bias", outputs) if bias else None)
        parameters = [self.weight(f"{name}.weight", outputs, inputs, dtype=dtype)]
        if bias:
            parameters.append(self.weight(f"{name}.bias", outputs, dtype=dtype))
        return self.g.op("Gemm", x, *parameters, name=name, transB=1)

    def linears(
        self,
        x: ir.Value,
        outputs: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        shaped: Shaped | None = None,
    ) -> list[ir.Value]:
        """x [rows, inputs] through each layer that `outputs` names; see the `joins_` of `Dialect`.

        `shaped`: gives a product [rows, n] another shape [..., n], all layers of a joined one at once.
        """
        layers = {n: stored_linear(self.checkpoint, self.prefix + n, inputs, m) for n, m in outputs.items()}
        stored = {name: layer for name, layer in layers.items() if layer is not None}
        plain = {name: outputs[name] for name in outputs if name not in stored}
        products: dict[str, ir.Value] = {}
        for names, layer in joined(stored) if self.dialect.joins_quantized and not bias else ():
            if len(names) > 1:
                self.used.update(info.name for name in names for info in stored[name].tensors)
                y = self._quantized(x, "-".join(names), layer, None)
                products |= self._split(y, {name: outputs[name] for name in names}, shaped)
        if self.dialect.joins_floats and len(plain) > 1:
            products |= self._split(self._joined(x, plain, inputs, bias=bias), plain, shaped)
        for name, n in outputs.items():
            if name not in products:
                y = self.linear(x, name, inputs, n, bias=bias)
                products[name] = y if shaped is None else shaped(y, n)
        return [products[name] for name in outputs]

    def _joined(self, x: ir.Value, outputs: Mapping[str, int], inputs: int, *, bias: bool) -> ir.Value:
        """One product with the weights of several layers, one below the other: folded as the graph is loaded."""
        name, shapes = "-".join(outputs), {"weight": (inputs,)} | ({"bias": ()} if bias else {})
        parameters = []
        for kind, columns in shapes.items():
            parts = [self.raw(f"{each}.{kind}", n, *columns) for each, n in outputs.items()]
            if len({part.dtype for part in parts}) > 1:
                parts = [self._outside.cast(part, self.g.dtype) for part in parts]
            whole = self._outside.op("Concat", *parts, name=f"{name}.{kind}", axis=0)
            parameters.append(
                self._outside.from_dtype(whole, parts[0].dtype or self.g.dtype, name=f"{name}.{kind}/cast")
            )
        return self.g.op("Gemm", x, *parameters, name=name, transB=1)

    def _split(self, y: ir.Value, outputs: Mapping[str, int], shaped: Shaped | None) -> dict[str, ir.Value]:
        sizes, name = self.g.constant(list(outputs.values())), "-".join(outputs)
        y = y if shaped is None else shaped(y, sum(outputs.values()))
        parts = self.g.multi("Split", y, sizes, outputs=len(outputs), name=f"{name}/split", axis=-1)
        return dict(zip(outputs, parts, strict=True))

    def _quantized(self, x: ir.Value, name: str, stored: StoredLinear, bias: ir.Value | None) -> ir.Value:
        self.used.update(info.name for info in stored.tensors)
        layer = QuantizedLinear(name=name, stored=stored, folder=self.folder, bias=bias)
        return self.dialect.quantized_linear(self.g, x, layer)

    def rms_norm(self, x: ir.Value, name: str | None, size: int, epsilon: float) -> ir.Value:
        """RMSNorm over the last axis, of length `size`, in float32. `name`: of its weights; None: it has none."""
        g = self.g
        if name is None:
            ones = g.constant(np.ones(size), g.dtype.numpy())
            return g.op("RMSNormalization", x, ones, name="norm", epsilon=epsilon, axis=-1)
        attributes: dict[str, Any] = {"name": name, "epsilon": epsilon, "axis": -1}
        if not self._zero_centred:
            return g.op("RMSNormalization", x, self.weight(f"{name}.weight", size), **attributes)
        # The sum of 1 and a small weight has more digits than a dtype of 16 bits.
        weight = self.weight(f"{name}.weight", size, dtype=FLOAT)
        scale = g.op("Add", weight, g.constant(1, np.float32), name=f"{name}.scale")
        return g.from_dtype(g.op("RMSNormalization", g.to_float(x), scale, **attributes), FLOAT)

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
