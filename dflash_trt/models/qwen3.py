"""Qwen3: a dense decoder that normalizes each head of its queries and keys."""

from __future__ import annotations

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.decoder import dense_layer
from dflash_trt.models.family import Family
from dflash_trt.models.reading import HEAD_DIM, check_quantization, decoder, target, windows


def _read(fields: Fields) -> TargetConfig:
    check_quantization(fields)
    # Qwen3Config's default of head_dim is 128, not hidden_size / num_attention_heads.
    common = decoder(fields, head_dim=fields.integer("head_dim", maximum=HEAD_DIM, default=128), qk_norm=True)
    return target(fields, common, windows(fields, common["num_hidden_layers"]))


FAMILY = Family("Qwen3ForCausalLM", "qwen3", _read, dense_layer)
