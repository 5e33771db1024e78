"""Qwen3-MoE: Qwen3 with experts instead of the MLP in most layers. Each expert is stored separately.

The parts of expert layers that other families share are here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.linears import stored_experts
from dflash_trt.checkpoint.schema import MoEConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Outline, TensorInfo
from dflash_trt.graph.builder import FLOAT, ONNX_DTYPES, GraphBuilder
from dflash_trt.graph.experts import Experts
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack
from dflash_trt.models.decoder import Stream, dense_layer, gated_mlp, mixer_block
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer
from dflash_trt.models.reading import LAYERS, WIDTH, Family, decoder, expert_counts, refuse, target, window_of


def _read(fields: Fields) -> TargetConfig:
    # Qwen3MoeConfig has neither layer_types nor a shared expert, but some checkpoints name them.
    refuse(
        fields,
        {
            "layer_types": (),
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0,),
            "use_qk_norm": (True,),
        },
    )
    common = decoder(fields, qk_norm=True)
    layers = common["num_hidden_layers"]
    moe = read_experts(fields, layers, ("num_experts", "num_local_experts"), normalize=False)
    # max_window_layers has no effect: if there is a window, every layer has it.
    return target(fields, common, [window_of(fields)] * layers, moe)


def read_experts(
    fields: Fields,
    layers: int,
    count_names: tuple[str, ...] = ("num_experts",),
    *,
    normalize: bool,
    **others: Any,
) -> MoEConfig:
    """The experts of a Qwen model with so many layers. `normalize`: what `norm_topk_prob` is where it is missing.

    others: further fields of MoEConfig.
    """
    experts, chosen = expert_counts(fields, count_names, ("num_experts_per_tok",))
    step = fields.integer("decoder_sparse_step", default=1)
    dense = stated([(fields, "mlp_only_layers")], partial(Fields.integers, most=LAYERS)) or ()
    return MoEConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=fields.integer("moe_intermediate_size", maximum=WIDTH),
        normalize_weights=fields.boolean("norm_topk_prob", default=normalize),
        sparse_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        **others,
    )


def moe_layer(m: Module, mixer: Mixer, c: TargetConfig, i: int, x: ir.Value, h: ir.Value) -> Stream:
    """A pre-norm layer with experts where `sparse_layers` says so, and an MLP elsewhere."""
    g, moe, mlp = m.g, c.moe, m.at("mlp")
    if moe is None or not moe.sparse_layers[i]:
        return dense_layer(m, mixer, c, i, x, h)
    x, h = mixer_block(m, mixer, c, i, x, h)
    with g.scope("mlp"):
        logits = mlp.router(h, "gate", c.hidden_size, moe.num_experts)
        dialect, whole = m.dialect, _is_stacked(mlp, moe)
        stacks = {} if whole and not dialect.experts_apart else expert_stacks(mlp, c.hidden_size, moe)
        if not stacks:
            y = experts(m, c.hidden_size, moe, h, logits, _paired(mlp, c.hidden_size, moe))
        elif dialect.experts_apart or any(stack.stored for stack in stacks.values()):
            layer = ExpertLayer(
                stacks=stacks,
                folder=m.folder,
                k=moe.experts_per_token,
                widened_bytes=widened_bytes(c.hidden_size, moe),
            )
            y = dialect.quantized_experts(g, h, logits, layer)
            y = weighted(g, y, logits, moe)
        else:
            y = experts(m, c.hidden_size, moe, h, logits, _joined(mlp, stacks))
        if moe.shared_intermediate_size:
            # ONNX's checker asks for the type of the first term. It knows none of the experts' operator.
            y = g.op("Add", _shared(mlp, c.hidden_size, moe, h), y, name="with_shared")
        return x, y


def _shared(m: Module, hidden: int, moe: MoEConfig, x: ir.Value) -> ir.Value:
    """The expert of every token, times the sigmoid of its gate."""
    g = m.g
    with g.scope("shared_expert"):
        y = gated_mlp(m.at("shared_expert"), x, hidden, moe.shared_intermediate_size)
        gate = m.router(x, "shared_expert_gate", hidden, 1)
        gate = g.from_dtype(g.op("Sigmoid", gate, name="gate"), FLOAT)
        return g.op("Mul", y, gate, name="gated")


def expert_stacks(m: Module, hidden: int, moe: MoEConfig) -> dict[Projection, Stack]:
    """The experts at `m`, which are two tensors or three for each."""
    if _is_stacked(m, moe):
        return _slices(m, hidden, moe)

    def stack(name: Projection, rows: int, columns: int) -> Stack:
        layers = [f"experts.{e}.{name}_proj" for e in range(moe.num_experts)]
        stored = stored_experts(m.checkpoint, [m.prefix + layer for layer in layers], columns, rows)
        if stored is None:
            plain = [m.stored(f"{layer}.weight", rows, columns) for layer in layers]
            return Stack(rows, columns, plain=tuple(plain))
        m.used.update(info.name for layer in stored for info in layer.tensors)
        return Stack(rows, columns, tuple(stored))

    inner = moe.intermediate_size
    return {
        "gate": stack("gate", inner, hidden),
        "up": stack("up", inner, hidden),
        "down": stack("down", hidden, inner),
    }


def _is_stacked(m: Module, moe: MoEConfig) -> bool:
    """Whether the layer's experts are two tensors."""
    whole = f"{m.prefix}experts.gate_up_proj"
    return moe.stacked and (isinstance(m.checkpoint, Outline) or whole in m.checkpoint.tensors)


def _paired(m: Module, hidden: int, moe: MoEConfig) -> Experts:
    """The layer's two tensors, with gates and ups interleaved: [E, 2, I, D] becomes [E, I, 2, D]."""
    g, n, inner = m.outside, moe.num_experts, moe.intermediate_size
    both = m.raw("experts.gate_up_proj", n, 2 * inner, hidden)
    halves = g.op("Reshape", both, g.constant([n, 2, inner, hidden]), name="gate_up/halves")
    pairs = g.op("Transpose", halves, name="gate_up/paired", perm=[0, 2, 1, 3])
    gate_up = g.op("Reshape", pairs, g.constant([n, 2 * inner, hidden]), name="gate_up")
    gate_up.type = ir.TensorType(m.dtype_of("experts.gate_up_proj"))
    return Experts(gate_up=gate_up, down=m.raw("experts.down_proj", n, hidden, inner))


def _slices(m: Module, hidden: int, moe: MoEConfig) -> dict[Projection, Stack]:
    """Each expert's part of the layer's two tensors: gate_up_proj [E, 2I, D], gates first, and down_proj [E, D, I]."""
    n, inner = moe.num_experts, moe.intermediate_size
    both = m.stored("experts.gate_up_proj", n, 2 * inner, hidden)
    down = m.stored("experts.down_proj", n, hidden, inner)

    def stack(whole: TensorInfo, name: Projection, rows: int, columns: int, first: int, parts: int) -> Stack:
        size = whole.nbytes // n // parts
        one = replace(whole, shape=(rows, columns), nbytes=size)
        starts = {e: whole.offset + (e * parts + first) * size for e in range(n)}
        experts = [replace(one, name=f"{whole.name}[{e}].{name}", offset=at) for e, at in starts.items()]
        return Stack(rows, columns, plain=tuple(experts))

    return {
        "gate": stack(both, "gate", inner, hidden, 0, 2),
        "up": stack(both, "up", inner, hidden, 1, 2),
        "down": stack(down, "down", hidden, inner, 0, 1),
    }


def _joined(m: Module, stacks: Mapping[Projection, Stack]) -> Experts:
    """Pack three matrices per expert into the operator's two tensors. An engine does this once, when it loads."""
    g, stack = m.outside, stacks["gate"]
    n, inner, hidden = len(stack.plain), stack.rows, stack.columns

    def stacked(name: Projection) -> ir.Value:
        matrices = [g.raw_weight(info, m.folder) for info in stacks[name].plain]
        return g.op("Concat", *matrices, name=f"{name}_proj/stacked", axis=0)

    # Interleave gate and up: [E, I, 1, D] beside [E, I, 1, D] becomes [E, 2I, D].
    halves = [
        g.op("Reshape", stacked(name), g.constant([n, inner, 1, hidden]), name=f"{name}_proj/split")
        for name in ("gate", "up")
    ]
    both = g.op("Concat", *halves, name="gate_up/paired", axis=2)
    gate_up = g.op("Reshape", both, g.constant([n, 2 * inner, hidden]), name="gate_up")
    down = g.op("Reshape", stacked("down"), g.constant([n, hidden, inner]), name="down")
    # The dtype on disk, for which the operator's body is made.
    gate_up.type = down.type = ir.TensorType(ONNX_DTYPES[stack.plain[0].dtype])
    return Experts(gate_up=gate_up, down=down)


FAMILY = Family("Qwen3MoeForCausalLM", "qwen3_moe", _read, moe_layer)


def experts(m: Module, hidden: int, moe: MoEConfig, x: ir.Value, logits: ir.Value, e: Experts) -> ir.Value:
    """x [rows, D], router logits [rows, E] in float32 -> [rows, D]."""
    body = m.dialect.moe(
        *("float" if e.gate_up_scales is None else "mxfp4", e.gate_up.dtype or m.g.dtype),
        biased=e.gate_up_bias is not None,
        widened_bytes=widened_bytes(hidden, moe),
    )
    tensors = (x, logits, e.gate_up, e.gate_up_scales, e.gate_up_bias, e.down, e.down_scales, e.down_bias)
    (y,) = m.g.call(
        body,
        *(tensor for tensor in tensors if tensor is not None),
        name="experts",
        k=moe.experts_per_token,
        alpha=moe.alpha,
        beta=moe.beta,
        limit=float(np.finfo(np.float32).max) if moe.limit is None else moe.limit,
    )
    return weighted(m.g, y, logits, moe)


def widened_bytes(hidden: int, moe: MoEConfig) -> int:
    """Bytes of all experts of the model in float32."""
    return 4 * 3 * hidden * moe.intermediate_size * moe.num_experts * sum(moe.sparse_layers)


def weighted(g: GraphBuilder, y: ir.Value, logits: ir.Value, moe: MoEConfig) -> ir.Value:
    """Scale y where the family's weights are a softmax over all logits.

    The operators weight by a softmax over the chosen logits. The softmax over all logits is that times the chosen
    share.
    """
    if moe.normalize_weights:
        return y
    best, _ = g.multi("TopK", logits, g.constant([moe.experts_per_token]), outputs=2, name="chosen")
    axis = g.constant([-1])
    chosen, total = (g.op("ReduceLogSumExp", v, axis, name="log_total") for v in (best, logits))
    share = g.op("Exp", g.op("Sub", chosen, total, name="log_share"), name="share")
    return g.op("Mul", y, g.from_dtype(share, FLOAT), name="weighted")
