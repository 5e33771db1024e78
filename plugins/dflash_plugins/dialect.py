"""The TensorRT dialect with plugins for attention, taps, acceptance, MXFP4 experts and Gated DeltaNet.

Each operator keeps its signature. Its body has one plugin node per kernel, in launch order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_plugins.plugins import NAMESPACE, versioned
from dflash_trt.checkpoint.schema import LayerDeltaNet
from dflash_trt.graph.builder import DFLASH_DOMAIN, DFLASH_VERSION, FLOAT, INT64, GraphBuilder
from dflash_trt.graph.delta_net import DeltaInputs
from dflash_trt.graph.dialect import AttentionInputs, AttentionKind, ranges
from dflash_trt.graph.experts import Storage, declared
from dflash_trt.graph.lowering import TRT_DOMAIN
from dflash_trt.graph.tensorrt import TensorRT


class TensorRTLayerPlugins(TensorRT):
    """Plugins for MXFP4 experts and Gated DeltaNet alone, which no operators of TensorRT-RTX fit. `dtype` must be BF16
    or FP16.
    """

    name = "tensorrt-layer-plugins"

    def mxfp4_experts(
        self, g: GraphBuilder, blocks: ir.Value, scales: ir.Value
    ) -> tuple[ir.Value, ir.Value | None]:
        """The blocks and scales as signed bytes: TensorRT widens unsigned bytes at a plugin's input to four bytes."""
        int8 = ir.DataType.INT8
        signed = [g.reinterpret(v, int8, [int(str(n)) for n in v.shape or ()]) for v in (blocks, scales)]
        return signed[0], signed[1]

    def moe(
        self, storage: Storage, weight_dtype: ir.DataType, *, biased: bool, widened_bytes: int
    ) -> ir.Function:
        """A node for each kernel of a layer of MXFP4 experts; other storage has the usual body."""
        if storage != "mxfp4":
            return super().moe(storage, weight_dtype, biased=biased, widened_bytes=widened_bytes)
        g = self._builder("MoE")
        x, router = g.input("x", self.dtype, ["rows", "D"]), g.input("router_logits", FLOAT, ["rows", "E"])
        weights: dict[str, tuple[ir.Value, ...]] = {}
        for name in ("gate_up", "down"):
            blocks = g.input(name, ir.DataType.INT8, ["E", "O", "G", 16])
            scales = g.input(f"{name}_scales", ir.DataType.INT8, ["E", "O", "G"])
            bias = [g.input(f"{name}_bias", self.dtype, ["E", "O"])] if biased else []
            weights[name] = blocks, scales, *bias
        k: dict[str, Any] = {"k": _attribute("k", ir.AttributeType.INT)}
        activation: dict[str, Any] = {
            name: _attribute(name, ir.AttributeType.FLOAT) for name in ("alpha", "beta", "limit")
        }
        shares, chosen, counts, arranged = _plugin(g, "MoERoute", router, x, outputs=4, **k)
        pairs, groups = _plugin(g, "MoEGroup", chosen, counts, outputs=2, **k)
        (hidden,) = _plugin(g, "MoEGateUp", arranged, pairs, groups, *weights["gate_up"], **k, **activation)
        (parts,) = _plugin(g, "MoEDown", hidden, shares, pairs, groups, *weights["down"])
        (y,) = _plugin(g, "MoECombine", parts, x, **k)
        g.output(y, "y", self.dtype, ["rows", "D"])
        return g.function(declared())

    def gated_delta_net(self, kind: LayerDeltaNet) -> ir.Function:
        """One node, which goes row by row."""
        g = self._builder("GatedDeltaNet")
        a = DeltaInputs(g, kind)
        a.output(*_plugin(g, "GatedDeltaNet", *g.graph.inputs, outputs=3))
        return g.function()

    def _builder(self, name: str) -> GraphBuilder:
        return GraphBuilder(name, dtype=self.dtype, opsets={TRT_DOMAIN: 1, DFLASH_DOMAIN: DFLASH_VERSION})


class TensorRTPlugins(TensorRTLayerPlugins):
    """All plugins."""

    name = "tensorrt-plugins"

    masks_by_layer = False

    def cache_sizes(self, head_dim: int, *, sinks: bool) -> tuple[int, int]:
        """No columns for sinks."""
        return head_dim, head_dim

    def attention_mask(self, kind: AttentionKind) -> ir.Function:
        """The ranges of cache rows in place of a mask."""
        return ranges(kind)

    def attention(self, kind: AttentionKind) -> ir.Function:
        """Nodes that write the cache, attend in parts and merge them."""
        g = self._builder("Windowed" * kind.windowed + kind.name)
        a = AttentionInputs(g, by_head=True, mask=None, trees=kind.trees)
        # The kernel scales by head_dim ** -0.5.
        q = self._scaled(g, a.q, 1 if kind.scale is None else kind.scale * kind.head_dim**0.5)
        sinks = [g.input("sinks", self.dtype, ["H"])] if kind.sinks else []
        k, v = self._written(g, a.caches, (a.k, a.v), a.start)
        tree = [a.start, *a.visible] if kind.trees else []
        how = {"group": kind.group, "windowed": int(kind.windowed)}
        parts = _plugin(g, "Attend", *(q, k, v, *a.ranges, *tree), outputs=3, **how)
        (y,) = _plugin(g, "MergeAttention", *parts, a.q, k, *sinks, heads=kind.heads, **how)
        a.output(y, k, v)
        return g.function()

    def hidden_state_tap(self, taps: int) -> ir.Function:
        """One node for all taps."""
        g = self._builder("HiddenStateTap")
        hidden = [g.input(f"h_{i}", self.dtype, ["rows", "D"]) for i in range(taps)]
        (features,) = _plugin(g, "HiddenStateTap", *hidden, n=taps)
        g.output(features, "features", self.dtype, ["rows", "nD"])
        return g.function()

    def block_acceptance(self) -> ir.Function:
        """Greedy acceptance: SampleRows at temperature 0, which ignores the other parameters."""
        g = self._builder("BlockAcceptance")
        tokens, rows = g.input("tokens", INT64, ["B", "S"]), g.input("rows", INT64, ["B", "R"])
        logits = g.input("logits", FLOAT, ["B", "R", "V"])
        batch = g.dim(tokens, 0, name="batch")

        def each(value: float, dtype: Any, name: str) -> ir.Value:
            return g.op("Expand", g.constant([value], dtype), batch, name=name)

        temperature, top_p = each(0, np.float32, "temperature"), each(1, np.float32, "top_p")
        reach, top_k = each(np.inf, np.float32, "reach"), each(0, np.int32, "top_k")
        seed = each(0, np.int64, "seed")
        partial = _plugin(g, "SampleTiles", logits, temperature, top_p, seed, rows, outputs=5)
        chosen = (logits, temperature, reach, top_k, top_p, seed, rows)
        _, sampled, _ = _plugin(g, "SampleSelect", *chosen, *partial, outputs=3)
        accepted, following = _plugin(g, "AcceptBlock", tokens, rows, sampled, outputs=2)
        g.output(accepted, "accepted", INT64, ["B"])
        g.output(following, "next", INT64, ["B"])
        return g.function()


def _attribute(name: str, kind: ir.AttributeType) -> ir.Attr:
    return ir.RefAttr(name, name, kind)


def _plugin(
    g: GraphBuilder, name: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any
) -> tuple[ir.Value, ...]:
    return g.multi(
        versioned(name),
        *inputs,
        outputs=outputs,
        name=name,
        domain=DFLASH_DOMAIN,
        plugin_namespace=NAMESPACE,
        plugin_version="1",
        **attributes,
    )
