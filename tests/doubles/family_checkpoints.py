"""Random checkpoints of Llama, Qwen3-MoE and gpt-oss in published form.

config.json is that of a known pair with smaller numbers. The tensors have the published names, layouts and dtypes.
They are written one by one, so that this project and Transformers each read them in their own way. Weights are drawn
as in checkpoints.py: logits have order 10, and every bias, sink, clamp and norm matters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import dflash_trt
from tests.doubles.checkpoints import (
    DTYPES,
    ENDOFTEXT,
    IM_END,
    VOCAB,
    draw,
    make_drafter,
    make_tokenizer,
    scale_head,
    write_json,
)

KNOWN = Path(dflash_trt.__file__).parent / "checkpoint" / "known"
EOS = [IM_END, ENDOFTEXT]
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None, "eos_token_id": EOS[0],
    "pad_token_id": None,
}  # fmt: skip
ORIGINAL_LENGTH = 32  # of RoPE, before scaling
# The published gpt-oss drafters: eight layers, biases, and the target's YaRN.
GPT_OSS_YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": ORIGINAL_LENGTH,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
GPT_OSS_DRAFTER: dict[str, Any] = {
    "layers": 8, "attention_bias": True, "rope_theta": 150_000, "rope_scaling": GPT_OSS_YARN,
}  # fmt: skip
# Root mean square of the sixteen E2M1 numbers.
_E2M1_RMS = math.sqrt(68.5 / 8)


def make_llama(directory: Path, *, seed: int = 0, favourites: int = 0, **fields: Any) -> Path:
    """Write a random LlamaForCausalLM with Llama 3.1's RoPE. `fields` replace fields of config.json."""
    config = _config("llama-3.1-8b", fields)
    tensors = _Tensors(config, seed)
    for i in range(config["num_hidden_layers"]):
        tensors.attention(i, 16)
        tensors.mlp(f"model.layers.{i}.mlp", bias=config["mlp_bias"])
    return _write(directory, config, tensors, favourites)


def make_qwen3_moe(directory: Path, *, seed: int = 0, favourites: int = 0, **fields: Any) -> Path:
    """Write a random Qwen3MoeForCausalLM with three tensors per expert. `fields` replace fields of config.json."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    config = _config("qwen3-coder-30b-a3b", sizes | fields)
    tensors = _Tensors(config, seed)
    for i in range(config["num_hidden_layers"]):
        tensors.attention(i, config["head_dim"], qk_norm=True)
        mlp = f"model.layers.{i}.mlp"
        if i in config["mlp_only_layers"] or (i + 1) % config["decoder_sparse_step"]:
            tensors.mlp(mlp)
            continue
        tensors.add(f"{mlp}.gate.weight", config["num_experts"], config["hidden_size"])
        for e in range(config["num_experts"]):
            tensors.mlp(f"{mlp}.experts.{e}", config["moe_intermediate_size"])
    return _write(directory, config, tensors, favourites)


def make_gpt_oss(
    directory: Path, *, quantized: bool = True, seed: int = 0, favourites: int = 0, **fields: Any
) -> Path:
    """Write a random GptOssForCausalLM, with or without MXFP4 experts. `fields` replace fields of config.json.

    Layers alternate between a window of 8 and full attention. Some preactivations of the experts exceed the clamp.
    """
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 4, "experts_per_token": 4, "head_dim": 32}
    config = _config("gpt-oss-20b", sizes | {"sliding_window": 8, "initial_context_length": 32} | fields)
    config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    if not quantized:
        del config["quantization_config"]
    tensors = _Tensors(config, seed)
    n, hidden, inner = (config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size"))
    for i in range(config["num_hidden_layers"]):
        tensors.attention(i, config["head_dim"])
        layer = f"model.layers.{i}"
        sinks = torch.randn(config["num_attention_heads"], generator=tensors.generator)
        tensors.values[f"{layer}.self_attn.sinks"] = 1 + 2 * sinks
        tensors.add(f"{layer}.mlp.router.weight", n, hidden)
        tensors.add(f"{layer}.mlp.router.bias", n)
        for name, rows, columns, gain in (
            ("gate_up_proj", 2 * inner, hidden, 3),
            ("down_proj", hidden, inner, 0.3),
        ):
            prefix = f"{layer}.mlp.experts.{name}"
            tensors.values[f"{prefix}_bias"] = 0.3 * torch.randn(n, rows, generator=tensors.generator)
            if quantized:
                blocks, scales = draw_mxfp4((n, rows, columns), gain, tensors.generator)
                tensors.values |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
            else:
                matrix = torch.randn(n, columns, rows, generator=tensors.generator)
                tensors.values[prefix] = gain * columns**-0.5 * matrix
    return _write(directory, config, tensors, favourites)


def draw_mxfp4(shape: tuple[int, int, int], gain: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blocks uint8 [E, out, in/32, 16] and scales uint8 [E, out, in/32] of matrices that scale by about `gain`."""
    groups = (*shape[:-1], shape[-1] // 32)
    exponent = round(math.log2(gain * shape[-1] ** -0.5 / _E2M1_RMS))
    blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(-1, 2, groups, generator=generator) + exponent + 127
    return blocks, scales.to(torch.uint8)


def make_gpt_oss_drafter(directory: Path, target_dir: Path, **settings: Any) -> Path:
    """Write a random drafter in the form of gpt-oss's published drafters. `settings` are those of make_drafter."""
    make_drafter(directory, target_dir, **(GPT_OSS_DRAFTER | settings))
    config = json.loads((directory / "config.json").read_text())
    config |= {"rms_norm_eps": 1e-5, "initial_context_length": ORIGINAL_LENGTH}
    write_json(directory / "config.json", config)
    return directory


def _config(known: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The published config.json of a known target, with smaller sizes and a matching original length."""
    config = json.loads((KNOWN / known / "target" / "config.json").read_text()) | SMALL
    if config["rope_scaling"]:
        config["rope_scaling"] |= {"original_max_position_embeddings": ORIGINAL_LENGTH}
    return config | fields


class _Tensors:
    """Draws tensors in the order of the requests."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self.config, self.values = config, dict[str, Tensor]()
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, name: str, *shape: int) -> None:
        self.values[name] = draw(name, shape, self.generator)

    def linear(self, name: str, outputs: int, inputs: int, bias: bool) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def attention(self, i: int, head_dim: int, *, qk_norm: bool = False) -> None:
        """Norms and attention of layer i."""
        c, prefix = self.config, f"model.layers.{i}"
        hidden, bias = c["hidden_size"], c["attention_bias"]
        q, kv = (c[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.add(f"{prefix}.{name}.weight", hidden)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            self.linear(f"{prefix}.self_attn.{name}", rows, hidden, bias)
        self.linear(f"{prefix}.self_attn.o_proj", hidden, q, bias)
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                self.add(f"{prefix}.self_attn.{name}.weight", head_dim)

    def mlp(self, prefix: str, inner: int | None = None, *, bias: bool = False) -> None:
        hidden, inner = self.config["hidden_size"], inner or self.config["intermediate_size"]
        for name in ("gate_proj", "up_proj"):
            self.linear(f"{prefix}.{name}", inner, hidden, bias)
        self.linear(f"{prefix}.down_proj", hidden, inner, bias)


def _write(directory: Path, config: dict[str, Any], tensors: _Tensors, favourites: int) -> Path:
    """Write floating-point tensors in config.json's dtype, and bytes unchanged."""
    shape = (config["vocab_size"], config["hidden_size"])
    for name in ("embed_tokens", "norm"):
        tensors.add(f"model.{name}.weight", *shape[1 if name == "norm" else 0 :])
    tensors.add("lm_head.weight", *shape)
    scale_head(tensors.values["lm_head.weight"], favourites)
    if config["tie_word_embeddings"]:
        tensors.values["model.embed_tokens.weight"] = tensors.values.pop("lm_head.weight")
    dtype = DTYPES[config.get("torch_dtype") or "bfloat16"]
    stored = {name: t if t.dtype == torch.uint8 else t.to(dtype) for name, t in tensors.values.items()}
    directory.mkdir(parents=True)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", {"do_sample": True, "eos_token_id": EOS})
    make_tokenizer(directory)
    return directory
