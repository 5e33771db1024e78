"""The mixer of each layer. Its entry in the configuration's `layers` selects it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dflash_trt.checkpoint.schema import LayerAttention, LayerDeltaNet
from dflash_trt.models.attention import Attention
from dflash_trt.models.delta_net import DeltaNet
from dflash_trt.models.passes import Mixer, Pass

# By the class of the entry in `DecoderConfig.layers`.
MIXERS: Mapping[type, Callable[[Pass, Sequence[int]], Mixer]] = {
    LayerAttention: Attention,
    LayerDeltaNet: DeltaNet,
}


def mixers(shared: Pass) -> list[Mixer]:
    """The mixer of each layer. Layers of one kind share a mixer."""
    layers = shared.config.layers
    kinds = {kind: [i for i, layer in enumerate(layers) if type(layer) is kind] for kind in map(type, layers)}
    by_kind = {kind: MIXERS[kind](shared, indices) for kind, indices in kinds.items()}
    return [by_kind[type(layer)] for layer in layers]
