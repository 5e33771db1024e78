"""Qwen3: a dense decoder that normalizes each head of its queries and keys."""

from __future__ import annotations

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.decoder import dense_layer
from dflash_trt.models.family import Family
from dflash_trt.models.reading import QWEN_HEAD_DIM, check_quantization, decoder, target, windows


def _read(fields: Fields) -> TargetConfig:
    check_quantization(fields)
    common = decoder(fields, head_dim=QWEN_HEAD_DIM, qk_norm=True)
    return target(fields, common, windows(fields, common["num_hidden_layers"]))


FAMILY = Family("Qwen3ForCausalLM", "qwen3", _read, dense_layer)
