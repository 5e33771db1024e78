"""The drafter in checkpoints of Qwen3-Next, Qwen3.5 and their successors (multi-token prediction): a chain (chain.py).

Its layer is one more layer of attention of the target's. Its state is the target's last one after the final norm, and
in later steps its own row after its last norm. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.mtp import ARCHITECTURES
from dflash_trt.checkpoint.schema import DecoderConfig, DrafterConfig, LayerAttention, TargetConfig
from dflash_trt.models.decoder import Stream
from dflash_trt.models.drafters.chain import BLOCK, ChainPass
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.families import FAMILIES
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer
from dflash_trt.models.qwen3_moe import moe_layer


def read_mtp(fields: Fields, read_target: Callable[[Fields], TargetConfig]) -> DrafterConfig:
    """The configuration, from the fields of the target's text model."""
    target = read_target(fields)
    count, moe = target.num_hidden_layers, target.moe
    layer = replace(
        target,
        num_hidden_layers=1,
        layers=(LayerAttention(True, None),),
        moe=moe and replace(moe, sparse_layers=(True,)),
    )
    common = {field.name: getattr(layer, field.name) for field in fields_of(DecoderConfig)}
    return DrafterConfig(
        **common,
        block_size=BLOCK,
        mask_token_id=0,
        target_layer_ids=(-1, count - 1),
        num_target_layers=count,
        masks=False,
        settings=layer,
    )


class _Pass(ChainPass):
    """One pass. A row of the layer is fc of its normed embedding beside its normed state."""

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts, parts.config.hidden_size)
        centred = self.config.zero_centred_norms
        self.m, self.embedding = self.m.at("mtp").centred(centred), self.embedding.centred(centred)
        self.find_head(None)

    def states(self, tapped: ir.Value) -> ir.Value:
        """The tap is before the target's last norm."""
        return self.embedding.rms_norm(tapped, "norm", self.config.hidden_size, self.config.rms_norm_eps)

    def enter(self, m: Module, tokens: ir.Value, states: ir.Value) -> tuple[ir.Value, ir.Value]:
        size, epsilon = self.config.hidden_size, self.config.rms_norm_eps
        parts = {"pre_fc_norm_embedding": tokens, "pre_fc_norm_hidden": states}
        both = [m.rms_norm(rows, name, size, epsilon) for name, rows in parts.items()]
        x = m.linear(m.g.op("Concat", *both, name="fc_input", axis=1), "fc", 2 * size, size)
        return x, m.at("layers.0").rms_norm(x, "input_layernorm", size, epsilon)

    def layer(self, m: Module, mixer: Mixer, x: ir.Value, h: ir.Value) -> Stream:
        return moe_layer(m.at("layers.0"), mixer, self.config.settings, 0, x, h)


def build_mtp(parts: DrafterParts) -> ir.Model:
    return _Pass(parts).drafted()


_TARGETS = {family.model_type: family.read for family in FAMILIES.values()}
KINDS = tuple(
    DrafterKind(name, f"{of}_mtp", partial(read_mtp, read_target=_TARGETS[of]), build_mtp)
    for of, name in ARCHITECTURES.items()
)
