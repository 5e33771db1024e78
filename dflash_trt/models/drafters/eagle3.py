"""EAGLE-3 (arXiv 2503.01840): a chain (chain.py) whose states are three taps, fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir

from dflash_trt.checkpoint.fields import Fields, stated
from dflash_trt.checkpoint.rope import read_rope
from dflash_trt.checkpoint.schema import DrafterConfig, LayerAttention
from dflash_trt.checkpoint.tensors import Checkpoint, same_bytes, tensor_names
from dflash_trt.errors import CheckpointError, quoted
from dflash_trt.models.decoder import Stream, gated_mlp, mixer_block
from dflash_trt.models.drafters.chain import BLOCK, ChainPass
from dflash_trt.models.drafters.kind import DrafterKind, DrafterParts
from dflash_trt.models.module import Module
from dflash_trt.models.passes import Mixer
from dflash_trt.models.reading import LAYERS, decoder, must_equal, refuse, windows

_STATES = 3  # tapped states of a row, beside the embedding


@dataclass(frozen=True, kw_only=True)
class Eagle3:
    """The settings that differ between published checkpoints.

    vocabulary: tokens of the drafter's head. layer: the name of the layer.
    fc_norm: an RMSNorm on each tapped state. norm_before_fc: one on all of a row together.
    norm_output: the next step gets the normed row.
    norm_before_residual: the normed states are added to the attention's output, not the states themselves.
    """

    vocabulary: int
    layer: str = "midlayer"
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False


NORMS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
# What Transformers' LlamaConfig has without `rope_theta`, which SafeAILab's files leave out.
_THETA = 10_000.0
# Fields that change the computation, with the values that this module computes.
_NEUTRAL = {
    "mlp_bias": (False,),
    "parallel_drafting": (False,),
    "pretraining_tp": (1,),
}
_NEUTRAL_EAGLE = {
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}


def read_eagle3(fields: Fields) -> DrafterConfig:
    """The configuration of an EAGLE-3 head: as SafeAILab, SpecForge or Model Optimizer save them.

    The last two have an `eagle_config`. SafeAILab's and SpecForge's layer is `midlayer`, whose tapped states are the
    outputs of the layers in the file; Model Optimizer's is `layers.0`, whose states enter them. The tensors tell, and
    before they are there, the file does. `draft_vocab_size` tells either from a target.
    """
    exported = fields.section("eagle_config")
    refuse(fields, _NEUTRAL)
    places = [fields]
    if exported is not None:
        refuse(exported, _NEUTRAL_EAGLE)
        places.append(exported)
    names = tensor_names(fields.path.parent)
    midlayer = any(name.startswith("midlayer.") for name in names) if names else exported is None
    layers = () if exported is None else eagle3_layers(exported)
    norms: dict[str, Any] = {
        name: stated([(place, name) for place in places], Fields.boolean) or False for name in NORMS
    }
    return eagle3_config(
        fields,
        entered=tuple(layer + 1 for layer in layers) if midlayer else layers,
        layer="midlayer" if midlayer else "layers.0",
        **norms,
    )


def eagle3_layers(fields: Fields) -> tuple[int, ...]:
    """The layers whose input is tapped; none where the file does not name them."""
    layers = partial(Fields.integers, most=LAYERS)
    return stated([(fields, "eagle_aux_hidden_state_layer_ids")], layers) or ()


def eagle3_config(
    fields: Fields,
    *,
    entered: Sequence[int],
    layers: Fields | None = None,
    **settings: Any,
) -> DrafterConfig:
    """The configuration of an EAGLE-3 head. `entered`: the layers whose input is tapped; none: the usual ones.

    layers: the fields of its layer, if they are apart. Then a layer of Qwen3's has norms of queries and keys.
    settings: fields of `Eagle3`.
    """
    apart = layers is not None
    layers = layers or fields
    common = decoder(
        layers,
        qk_norm=apart and layers.get("model_type") == "qwen3",
        rope=None if apart else read_rope(layers, theta=_THETA),
    )
    if common["num_hidden_layers"] != 1:
        raise layers.error("num_hidden_layers", f"is {common['num_hidden_layers']}, but EAGLE-3 has 1 layer")
    (window,) = windows(layers, 1)
    if window is not None:
        raise layers.error("sliding_window", f"is {window}, but EAGLE-3 heads are supported without a window")
    must_equal(fields, "target_hidden_size", "hidden_size", common["hidden_size"])
    if entered and len(entered) != _STATES:
        raise fields.error(
            "eagle_aux_hidden_state_layer_ids", f"is {quoted(list(entered))}, expected {_STATES} layers"
        )
    vocabulary = fields.integer("draft_vocab_size", maximum=common["vocab_size"])
    return DrafterConfig(
        **common,
        layers=(LayerAttention(True, None),),
        block_size=BLOCK,
        mask_token_id=0,
        target_layer_ids=taps_entering(entered) if entered else (),
        masks=False,
        own_head=True,
        most_candidates=vocabulary,
        settings=Eagle3(vocabulary=vocabulary, **settings),
    )


def taps_entering(layers: Sequence[int]) -> tuple[int, ...]:
    """Our taps for states that enter these layers: the embedding, and the states after the layers before them."""
    return (-1, *(layer - 1 for layer in layers))


def usual_taps(layers: int) -> tuple[int, ...]:
    """The taps of the official heads, which do not name them: what enters layers 2, N/2 and N - 3 of N."""
    return taps_entering([min(2, layers - 1), layers // 2, max(layers - 3, 0)])


def build_eagle3(parts: DrafterParts) -> ir.Model:
    return _Pass(parts).drafted()


class _Pass(ChainPass):
    """One pass of a head. A row of its attention is a normed embedding beside normed states."""

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts, 2 * parts.config.hidden_size)
        settings = self.config.settings
        self.recycles_norm = settings.norm_output
        _check_embedding(self.m, self.embedding)
        whole = settings.vocabulary == self.config.vocab_size
        for name in ("t2d", "d2t") if whole else ():
            self.m.ignore(name)
        self.find_head(None if whole else settings.vocabulary)

    def states(self, tapped: ir.Value) -> ir.Value:
        """fc over the tapped states, normed first where the settings say so."""
        g, m, settings, epsilon = self.g, self.m, self.config.settings, self.config.rms_norm_eps
        hidden = self.config.hidden_size
        if settings.norm_before_fc:
            tapped = m.rms_norm(tapped, "input_norm", _STATES * hidden, epsilon)
        if settings.fc_norm:
            sizes = g.constant([hidden] * _STATES)
            parts = g.multi("Split", tapped, sizes, outputs=_STATES, name="states", axis=1)
            normed = [m.rms_norm(part, f"fc_norm.{k}", hidden, epsilon) for k, part in enumerate(parts)]
            tapped = g.op("Concat", *normed, name="normed_states", axis=1)
        return m.linear(tapped, "fc", _STATES * hidden, hidden)

    def enter(self, m: Module, tokens: ir.Value, states: ir.Value) -> tuple[ir.Value, ir.Value]:
        layer, size, epsilon = (
            m.at(self.config.settings.layer),
            self.config.hidden_size,
            self.config.rms_norm_eps,
        )
        token = layer.rms_norm(tokens, "input_layernorm", size, epsilon)
        normed = layer.rms_norm(states, "hidden_norm", size, epsilon)
        row = m.g.op("Concat", token, normed, name="layer_input", axis=1)
        return normed if self.config.settings.norm_before_residual else states, row

    def layer(self, m: Module, mixer: Mixer, x: ir.Value, h: ir.Value) -> Stream:
        layer, config = m.at(self.config.settings.layer), self.config
        x, h = mixer_block(layer, mixer, config, 0, x, h)
        return x, gated_mlp(layer.at("mlp"), h, config.hidden_size, config.intermediate_size)


def _check_embedding(m: Module, target: Module) -> None:
    """A copy of the target's embedding may be there. Features hold the target's, so another one is refused."""
    name = "embed_tokens.weight"
    mine, other = m.checkpoint, target.checkpoint
    if isinstance(mine, Checkpoint) and isinstance(other, Checkpoint) and m.has(name):
        m.ignore(name)
        if not same_bytes(mine[name], other[target.prefix + name]):
            raise CheckpointError(
                f"{mine[name].file}: {name} differs from the target's model.embed_tokens.weight; an EAGLE-3 head with "
                "an embedding of its own is not supported"
            )


KINDS = tuple(
    DrafterKind(name, "llama", read_eagle3, build_eagle3, taps=usual_taps, also=("qwen3", "qwen2"))
    for name in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
)
