"""Llama 3: a dense decoder. Its linear layers may have biases."""

from __future__ import annotations

from dflash_trt.checkpoint.fields import Fields
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.models.decoder import dense_layer
from dflash_trt.models.family import Family
from dflash_trt.models.reading import check_quantization, decoder, refuse, target


def _read(fields: Fields) -> TargetConfig:
    check_quantization(fields)
    refuse(fields, {"pretraining_tp": (1,)})
    common = decoder(fields, mlp_bias=fields.boolean("mlp_bias", default=False))
    return target(fields, common, [None] * common["num_hidden_layers"])


FAMILY = Family("LlamaForCausalLM", "llama", _read, dense_layer)
