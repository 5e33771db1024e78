"""What every decoder family and the drafter share: linears, norms, RoPE, cached attention, gated MLP.

Hidden states are kept flat, [B*S, D], so that every linear is one Gemm on the checkpoint's own [out, in] weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.config import DecoderConfig, LayerAttention
from dflash_trt.checkpoint.linears import StoredLinear, joined, stored_linear, widened_bytes
from dflash_trt.checkpoint.rope import inverse_frequencies
from dflash_trt.checkpoint.tensors import Checkpoint, Outline, TensorInfo
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.base import FLOAT_DTYPES
from dflash_trt.graph.builder import FLOAT, INT64, ONNX_DTYPES, GraphBuilder
from dflash_trt.graph.dialect import Dialect


class Module:
    """A place in a checkpoint: knows its tensors' prefix, checks each tensor's shape and dtype where it is used."""

    def __init__(
        self, g: GraphBuilder, checkpoint: Checkpoint | Outline, folder: str, dialect: Dialect
    ) -> None:
        self.g, self.checkpoint, self.folder, self.dialect = g, checkpoint, folder, dialect
        self.prefix = ""
        self.used: set[str] = set()
        self._widened_bytes = widened_bytes(checkpoint)

    def at(self, prefix: str) -> Module:
        below = copy(self)
        below.prefix = f"{self.prefix}{prefix}."
        return below

    def raw(self, name: str, *shape: int) -> ir.Value:
        """The tensor as stored, in a floating-point type."""
        return self.g.raw_weight(self.stored(name, *shape), self.folder)

    def stored(self, name: str, *shape: int) -> TensorInfo:
        """Where the tensor lies, in a floating-point type."""
        return self._checked(name, shape, FLOAT_DTYPES)

    def packed(self, name: str, *shape: int) -> ir.Value:
        """Quantized data or its scales: bytes."""
        return self.g.raw_weight(self._checked(name, shape, ("U8",)), self.folder)

    def dtype_of(self, name: str) -> ir.DataType:
        """Of a tensor that was used before."""
        return ONNX_DTYPES[self.checkpoint.tensors[self.prefix + name].dtype]

    def _checked(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> TensorInfo:
        info = self.checkpoint.expect(self.prefix + name, shape, dtypes)
        self.used.add(info.name)
        return info

    def weight(self, name: str, *shape: int, dtype: ir.DataType | None = None) -> ir.Value:
        """The tensor in `dtype`, by default the graph's: as it lies on disk, if it has that dtype already."""
        return self.g.cast(self.raw(name, *shape), dtype or self.g.dtype, name=f"{name}/cast")

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
        """x [rows, inputs] -> [rows, outputs], x being in `dtype`, by default the graph's.

        A quantized weight is multiplied as it is stored; in a `dtype` of its own a layer cannot be quantized.
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
        self, x: ir.Value, outputs: Mapping[str, int], inputs: int, *, bias: bool = False
    ) -> list[ir.Value]:
        """x [rows, inputs] through each of the layers named in `outputs`; see `Dialect.joins_quantized`."""
        stored = {}
        if self.dialect.joins_quantized and not bias:
            for name, n in outputs.items():
                if (layer := stored_linear(self.checkpoint, self.prefix + name, inputs, n)) is not None:
                    stored[name] = layer
        found: dict[str, ir.Value] = {}
        for names, layer in joined(stored):
            if len(names) > 1:
                self.used.update(info.name for name in names for info in stored[name].tensors)
                name = "-".join(names)
                y = self._quantized(x, name, layer, None)
                sizes = self.g.constant([outputs[n] for n in names])
                split = self.g.multi("Split", y, sizes, outputs=len(names), name=f"{name}/split", axis=1)
                found |= zip(names, split, strict=True)
        return [
            found[name] if name in found else self.linear(x, name, inputs, n, bias=bias)
            for name, n in outputs.items()
        ]

    def _quantized(self, x: ir.Value, name: str, stored: StoredLinear, bias: ir.Value | None) -> ir.Value:
        self.used.update(info.name for info in stored.tensors)
        return self.dialect.quantized_linear(
            self.g, x, stored, self.folder, bias, name=name, widened_bytes=self._widened_bytes
        )

    def rms_norm(self, x: ir.Value, name: str, size: int, epsilon: float) -> ir.Value:
        """Over the last axis, of length `size`, in float32."""
        return self.g.op(
            "RMSNormalization", x, self.weight(f"{name}.weight", size), name=name, epsilon=epsilon, axis=-1
        )

    def check_all_used(self, ignored: tuple[str, ...] = ()) -> None:
        """A tensor that no graph reads means that the checkpoint is not what its config says.

        Caches stay in the compute dtype, which TensorRT's KVCacheUpdate asks for: scales of an FP8 cache go unused.
        """
        left = sorted(set(self.checkpoint.tensors) - self.used - set(ignored))
        if self.checkpoint.quantization.kv_cache:
            left = [name for name in left if not name.endswith((".k_scale", ".v_scale"))]
        if left:
            raise CheckpointError(
                f"{self.checkpoint.directory}: {len(left)} tensors are not part of the architecture that config.json "
                f"describes: {', '.join(left[:4])}{', ...' if len(left) > 4 else ''}"
            )


class Rows:
    """Rows that go through a layer together: B sequences x S rows, at given positions, with their rotations."""

    def __init__(
        self, g: GraphBuilder, batch: ir.Value, count: ir.Value, positions: ir.Value, config: DecoderConfig
    ):
        self.g, self.batch, self.count, self.positions = g, batch, count, positions
        self._shapes: dict[tuple[int, ...], ir.Value] = {}
        frequencies, factor = inverse_frequencies(
            config.rope, config.head_dim, config.max_position_embeddings
        )
        # Angles in float32 from the position itself, as Transformers computes them; no table, so no length limit.
        angles = g.op(
            "Mul",
            g.op("Cast", g.unsqueeze(positions, 2), name="position", to=int(FLOAT)),
            g.constant(frequencies, np.float32),
            name="angles",
        )
        rotations = [g.op(kind, angles, name=kind.lower()) for kind in ("Cos", "Sin")]
        if factor != 1.0:
            rotations = [g.op("Mul", r, g.constant(factor, np.float32), name="scaled") for r in rotations]
        self.cos, self.sin = (g.to_dtype(r, FLOAT) for r in rotations)

    def shape(self, *tail: int) -> ir.Value:
        """The shape [B, S, *tail] as a tensor."""
        if tail not in self._shapes:
            self._shapes[tail] = self.g.shape(self.batch, self.count, *tail)
        return self._shapes[tail]

    def heads(self, x: ir.Value, n: int, size: int) -> ir.Value:
        """[B*S, n*size] -> [B, S, n, size]."""
        return self.g.op("Reshape", x, self.shape(n, size), name="heads")

    def rotate(self, x: ir.Value) -> ir.Value:
        """[B, S, n, size] -> [B, n, S, size], rotated by position (half-split pairs)."""
        x = self.g.op("Transpose", x, name="by_head", perm=[0, 2, 1, 3])
        return self.g.op("RotaryEmbedding", x, self.cos, self.sin, name="rope")


class CachedAttention:
    """Everything the attention layers of one pass share: slots written, masks by kind of layer, caches."""

    def __init__(
        self,
        g: GraphBuilder,
        dialect: Dialect,
        config: DecoderConfig,
        capacity: int | str,
        start: ir.Value,
        queries: Rows,
        written: Rows,
        lengths: ir.Value,
    ) -> None:
        self.g, self.dialect, self.config, self.sinks = g, dialect, config, config.attention_sinks
        self.start, self.queries, self.written, self.lengths = start, queries, written, lengths
        self._shapes: list[list[int | str]] = [
            ["B", config.num_key_value_heads, capacity, size]
            for size in dialect.cache_sizes(config.head_dim, sinks=self.sinks)
        ]
        self.caches = [
            tuple(
                g.input(f"{side}_cache.{i}", g.dtype, shape)
                for side, shape in zip("kv", self._shapes, strict=True)
            )
            for i in range(config.num_hidden_layers)
        ]
        self._capacity = g.dim(self.caches[0][0], 2, name="capacity")
        self._masks: dict[LayerAttention, tuple[ir.Value, ...]] = {}

    def _mask(self, kind: LayerAttention) -> tuple[ir.Value, ...]:
        """Slot j holds position j, so what a row sees is a range of slots: first .. last."""
        if kind not in self._masks:
            g, position = self.g, self.queries.positions
            if kind.causal:
                last = position
            else:
                final = g.op("Sub", g.unsqueeze(self.lengths, 1), g.constant(1), name="final_slot")
                if kind.window is None:
                    last = g.op("Expand", final, g.shape(self.queries.batch, self.queries.count), name="last")
                else:  # a window without direction reaches as far ahead as back
                    last = g.op(
                        "Min", g.op("Add", position, g.constant(kind.window - 1), name="ahead"), final
                    )
            if kind.window is None:
                first = g.op("Sub", position, position, name="first")
            else:
                first = g.op("Sub", position, g.constant(kind.window - 1), name="first")
            name = f"mask_{'causal' if kind.causal else 'block'}{kind.window or ''}"
            slots = [first, last]
            if self.sinks:
                body = self.dialect.sink_attention_mask()
                slots.append(self.lengths)
            else:
                body = self.dialect.attention_mask()
            self._masks[kind] = g.call(body, *slots, self._capacity, outputs=2, name=name)
        return self._masks[kind]

    def layer(self, m: Module, i: int, x: ir.Value, kv_input: ir.Value) -> ir.Value:
        """Self-attention of layer i. x [B*S, D]: the rows that ask; kv_input [B*T, D]: the rows that are written."""
        g, c = self.g, self.config
        size, bias = c.head_dim, c.attention_bias
        n_q, n_kv = c.num_attention_heads, c.num_key_value_heads
        asking, written = {"q_proj": n_q * size}, {"k_proj": n_kv * size, "v_proj": n_kv * size}
        if kv_input is x:
            q, k, v = m.linears(x, asking | written, c.hidden_size, bias=bias)
        else:
            (q,) = m.linears(x, asking, c.hidden_size, bias=bias)
            k, v = m.linears(kv_input, written, c.hidden_size, bias=bias)
        q = self.queries.heads(q, n_q, size)
        k, v = (self.written.heads(value, n_kv, size) for value in (k, v))
        if c.qk_norm:
            q = m.rms_norm(q, "q_norm", size, c.rms_norm_eps)
            k = m.rms_norm(k, "k_norm", size, c.rms_norm_eps)
        body = self.dialect.sink_attention(size) if self.sinks else self.dialect.cached_attention(size)
        y, *updated = g.call(
            body,
            self.queries.rotate(q),
            self.written.rotate(k),
            g.op("Transpose", v, name="by_head", perm=[0, 2, 1, 3]),
            *self.caches[i],
            self.start,
            *self._mask(c.layers[i]),
            self.lengths,
            *([m.weight("sinks", n_q)] if self.sinks else []),
            outputs=3,
            name="cached",
        )
        for side, cache, shape in zip("kv", updated, self._shapes, strict=True):
            g.output(cache, f"{side}_cache_out.{i}", g.dtype, shape)
        y = g.op("Transpose", y, name="by_row", perm=[0, 2, 1, 3])
        y = g.op("Reshape", y, g.constant([-1, n_q * size]), name="merge")
        return m.linear(y, "o_proj", n_q * size, c.hidden_size, bias=bias)


def attention_block(m: Module, attention: CachedAttention, i: int, x: ir.Value) -> ir.Value:
    """The first half of a pre-norm layer: x + attention(norm(x)), x [B*S, D]."""
    g, c = m.g, attention.config
    with g.scope("attention"):
        h = m.rms_norm(x, "input_layernorm", c.hidden_size, c.rms_norm_eps)
        return g.op("Add", x, attention.layer(m.at("self_attn"), i, h, h), name="residual")


def gated_mlp(m: Module, x: ir.Value, hidden: int, intermediate: int, *, bias: bool = False) -> ir.Value:
    """SwiGLU: down(silu(gate(x)) * up(x))."""
    gate, up = m.linears(x, {"gate_proj": intermediate, "up_proj": intermediate}, hidden, bias=bias)
    h = m.g.op("Mul", m.g.op("Swish", gate, name="silu"), up, name="gated")
    return m.linear(h, "down_proj", intermediate, hidden, bias=bias)


def embed(m: Module, tokens: ir.Value, vocab: int, hidden: int, name: str = "embed_tokens") -> ir.Value:
    """tokens [B,S] -> [B*S, D]. The table is read as it lies on disk: only the rows looked up are widened."""
    g = m.g
    flat = g.op("Reshape", tokens, g.constant([-1]), name="flat_tokens")
    rows = g.op("Gather", m.raw(f"{name}.weight", vocab, hidden), flat, name=name)
    return g.to_dtype(rows, m.dtype_of(f"{name}.weight"), name=f"{name}/cast")


def positions_from(g: GraphBuilder, start: ir.Value, count: ir.Value, name: str = "positions") -> ir.Value:
    """[B, count]: start, start+1, ..."""
    return g.op("Add", g.unsqueeze(start, 1), g.arange(count), name=name)


def ints(g: GraphBuilder, name: str, *shape: int | str) -> ir.Value:
    return g.input(name, INT64, shape)


def cache_bytes_per_token(model: ir.Model) -> int:
    """What one token takes in all caches of a graph."""
    total = 0
    for value in model.graph.inputs:
        if value.name and "_cache." in value.name and value.shape is not None and value.dtype is not None:
            _, heads, _, size = value.shape
            total += int(str(heads)) * int(str(size)) * round(value.dtype.itemsize)
    return total
