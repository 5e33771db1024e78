"""DFlare: DFlash whose layers each fuse the tapped states themselves, and project the context with matrices of its own.

The context of a layer is a mixture of the tapped states. The shares are a softmax of `layer_fusion_weights`.
Its keys and values come from `k_proj_target` and `v_proj_target`, those of block rows from `k_proj` and `v_proj`.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_trt.models.drafters.block import FP16_FEATURE_SCALE, BlockPass, block_builder
from dflash_trt.models.drafters.dflash import read_dflash
from dflash_trt.models.drafters.kind import DrafterKind


@block_builder
def build_dflare(block: BlockPass, width: int) -> tuple[ir.Value, ir.Value]:
    """DFlare: a context for each layer."""
    g, config = block.g, block.config
    hidden, taps, layers = config.hidden_size, len(config.target_layer_ids), config.num_hidden_layers
    states = g.from_dtype(block.features, block.features.dtype or g.dtype)
    states = g.op("Reshape", states, g.shape(-1, taps, hidden), name="states")
    epsilon = config.rms_norm_eps
    if g.dtype == ir.DataType.FLOAT16:
        states = g.op("Mul", states, g.scalar(FP16_FEATURE_SCALE), name="into_range")
        epsilon *= FP16_FEATURE_SCALE**2
    shares = g.op("Softmax", block.m.weight("layer_fusion_weights", layers, taps), name="shares", axis=-1)
    fused = g.op("MatMul", shares, states, name="fused")  # [B*S, L, D]
    fused = block.m.rms_norm(fused, "hidden_norm", hidden, epsilon)
    contexts = g.multi("Split", fused, g.constant([1] * layers), outputs=layers, name="contexts", axis=1)
    flat = [g.op("Reshape", each, g.constant([-1, hidden]), name="context") for each in contexts]
    x = block.embedded(fuse=False)
    for i in range(layers):
        x = block.layer(i, x, context=flat[i])
    return block.best(block.logits(block.drafted(x)), width)


KIND = DrafterKind("QwenDFlareDraftModel", "qwen3", read_dflash, build_dflare)
