"""Published configurations of the families, compared with Transformers' own reading of them, and RoPE in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    GptOssConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, Qwen3MoeSparseMoeBlock
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from dflash_trt.checkpoint.catalogue import PAIRS, known_configs
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.checkpoint.rope import RopeConfig, inverse_frequencies
from dflash_trt.checkpoint.schema import DrafterConfig, MoEConfig, TargetConfig
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.checkpoint.test_config import MISSING, changed, write
from tests.doubles.text_checkpoints import SMALL, YARN

PUBLISHED = [pair.name for pair in PAIRS if pair.target_repo is not None]
ROTARY = {
    "gpt_oss": GptOssRotaryEmbedding, "llama": LlamaRotaryEmbedding,
    "muse_glimmer_text": MuseGlimmerTextRotaryEmbedding, "qwen3": Qwen3RotaryEmbedding,
    "qwen3_moe": Qwen3MoeRotaryEmbedding, "qwen3_next": Qwen3NextRotaryEmbedding,
    "qwen3_5_text": Qwen3_5TextRotaryEmbedding, "qwen3_5_moe_text": Qwen3_5TextRotaryEmbedding,
}  # fmt: skip

MINISTRAL = SMALL | {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_parameters": YARN,
}  # fmt: skip


def published(name: str, role: str = "target") -> dict[str, Any]:
    if name == "ministral":
        return MINISTRAL
    config: dict[str, Any] = json.loads((known_configs(name)[role == "drafter"] / "config.json").read_text())
    return config


def read(tmp_path: Path, name: str, **changes: Any) -> TargetConfig:
    return read_target_config(write(tmp_path, changed(published(name), changes)))


def transformers_windows(config: Any) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:  # Qwen3Moe: every layer has the window, if there is one
        return [window] * config.num_hidden_layers
    rows = [kind for kind in types if kind != "linear_attention"]
    return [window if kind == "sliding_attention" else None for kind in rows]


def assert_as_transformers(mine: TargetConfig | DrafterConfig, theirs: Any) -> None:
    theirs.allow_global_per_layer_attribute_access = True
    for field in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "attention_bias",
    ):
        default = theirs.hidden_size // theirs.num_attention_heads if field == "head_dim" else None
        if field == "intermediate_size" and theirs.model_type == "qwen3_5_moe_text":  # no layer has an MLP
            continue
        assert getattr(mine, field) == getattr(theirs, field, default), field
    assert [layer.window for layer in mine.attention_layers] == transformers_windows(theirs)
    if theirs.model_type == "gemma4_text":
        return assert_heads_as_transformers(mine, theirs)
    rotary = ROTARY[theirs.model_type](theirs)
    frequencies, factor = inverse_frequencies(mine.rope, mine.heads.rotary_dim, mine.max_position_embeddings)
    np.testing.assert_allclose(frequencies, rotary.inv_freq.numpy(), rtol=4e-7, atol=0)
    assert factor == pytest.approx(rotary.attention_scaling, rel=1e-12)
    return None


def assert_heads_as_transformers(mine: TargetConfig | DrafterConfig, theirs: Any) -> None:
    """Of each layer, where layers have heads of several kinds."""
    rotary = Gemma4TextRotaryEmbedding(theirs)
    for layer, config, kind in zip(
        mine.attention_layers, theirs.per_layer_config, theirs.layer_types, strict=True
    ):
        heads = mine.heads_of(layer)
        assert (heads.kv_heads, heads.head_dim) == (config.num_key_value_heads, config.head_dim)
        frequencies, _ = inverse_frequencies(heads.rope, heads.rotary_dim, mine.max_position_embeddings)
        expected = getattr(rotary, f"{kind}_inv_freq").numpy()
        np.testing.assert_allclose(frequencies, expected, rtol=4e-7, atol=0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_targets_mean_what_transformers_reads(name: str) -> None:
    directory, _ = known_configs(name)
    mine, theirs = read_target_config(directory), AutoConfig.from_pretrained(directory).get_text_config()
    assert_as_transformers(mine, theirs)
    assert next(pair.family for pair in PAIRS if pair.name == name) == theirs.model_type
    assert mine.tie_word_embeddings == theirs.tie_word_embeddings
    assert mine.mlp_bias == getattr(theirs, "mlp_bias", False)
    assert mine.qk_norm == theirs.model_type.startswith(("qwen3", "gemma4", "muse"))
    assert mine.attention_sinks == (theirs.model_type == "gpt_oss")
    assert all(layer.causal for layer in mine.attention_layers)
    if theirs.model_type == "gpt_oss":
        said = {"alpha": 1.702, "beta": 1.0, "limit": 7.0, "quantization": "mxfp4"}
        assert {name: getattr(mine.moe, name) for name in said} == said


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_drafters_belong_to_their_targets(name: str) -> None:
    target, drafter = (
        read_target_config(known_configs(name)[0]),
        read_drafter_config(known_configs(name)[1]),
    )
    check_pair(target, drafter)
    values = {key: value for key, value in published(name, "drafter").items() if key != "model_type"}
    assert_as_transformers(drafter, Qwen3Config(**values))
    assert next(pair.block_size for pair in PAIRS if pair.name == name) == drafter.block_size
    assert drafter.qk_norm
    causal = published(name, "drafter").get("is_causal")
    for layer in drafter.layers:
        assert layer.causal == (layer.window is not None if causal is None else causal)
    layers, count = target.num_hidden_layers, len(drafter.target_layer_ids)
    rule = tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))
    if name != "qwen3.8-27b":  # the DFlash2 drafter has others
        assert drafter.target_layer_ids == rule  # from the second layer to the third last, evenly


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_pair_says_what_it_rests_on(name: str) -> None:
    pair = next(pair for pair in PAIRS if pair.name == name)
    assert bool(pair.source) == (pair.drafter_repo is not None)
    assert (pair.doubt is None) == (not pair.unverified)
    for field in pair.unverified:
        role, *places, key = field.split(".")
        values = published(name, role)
        for place in ["text_config" if role == "target" else "", *places]:
            values = values[place] if place else values
        assert key in values, field


# Quoted from the published files: layers, key-value heads, size of the MLP, mask, window of sliding layers, and taps.
QUOTED = {
    "qwen3.5-4b": (6, 8, 9216, 248077, 4096, (1, 5, 9, 13, 17, 21, 25, 29)),
    "qwen3.5-27b": (6, 8, 17408, 248077, 4096, (1, 10, 18, 27, 35, 44, 52, 61)),
    "qwen3.5-35b-a3b": (6, 8, 6144, 248077, 4096, (1, 6, 11, 16, 22, 27, 32, 37)),
    "qwen3.5-122b-a10b": (6, 8, 9216, 248077, 4096, (1, 7, 14, 20, 26, 32, 39, 45)),
    "qwen3.6-27b": (5, 8, 17408, 248070, 2048, (1, 16, 31, 46, 61)),
    "qwen3.6-35b-a3b": (6, 8, 6144, 248077, 4096, (1, 6, 11, 16, 22, 27, 32, 37)),
    "qwen3.8-27b": (5, 8, 17408, 248070, 2048, (5, 19, 33, 47, 61)),
}


@pytest.mark.parametrize("name", QUOTED)
def test_drafters_of_hybrids_are_the_published_ones(name: str) -> None:
    c = read_drafter_config(known_configs(name)[1])
    windows = {layer.window for layer in c.layers[:-1]}
    assert (
        *(c.num_hidden_layers, c.num_key_value_heads, c.intermediate_size, c.mask_token_id),
        *(*windows, c.target_layer_ids),
    ) == QUOTED[name]
    assert c.layers[-1].window == (2048 if name == "qwen3.8-27b" else None)
    assert (c.num_attention_heads, c.head_dim, c.rope.theta, c.vocab_size) == (32, 128, 1e7, 248320)


# Sizes of the published model.safetensors: GiB to two places, as the hub lists them; the first in bytes.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("qwen3-4b", 1_074_860_568 / 2**30), ("qwen3-8b", 1.95), ("qwen3-coder-30b-a3b", 0.88),
        ("llama-3.1-8b", 1.95), ("gpt-oss-20b", 1.46), ("gpt-oss-120b", 1.46), ("qwen3-coder-next", 0.88),
        ("qwen3.5-4b", 1.18), ("qwen3.5-9b", 2.41),
    ],
)  # fmt: skip
def test_known_drafters_have_the_published_size(name: str, size: float) -> None:
    c = read_drafter_config(known_configs(name)[1])
    hidden, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = 2 * hidden * (q + kv) + 3 * hidden * c.intermediate_size + 2 * hidden + 2 * c.head_dim
    layer += (q + 2 * kv + hidden) * c.attention_bias
    elements = c.num_hidden_layers * layer + len(c.target_layer_ids) * hidden**2 + 2 * hidden
    assert 2 * elements / 2**30 == pytest.approx(size, abs=0.005)


def test_llama(tmp_path: Path) -> None:
    config = read(tmp_path, "llama-3.1-8b")
    assert config.moe is None
    assert config.head_dim == 4096 // 32  # not stated
    assert config.rope.rope_type == "llama3"
    assert config.eos_token_ids == (128001, 128008, 128009)
    config = read(tmp_path, "llama-3.1-8b", attention_bias=True, mlp_bias=True, head_dim=64)
    assert (config.attention_bias, config.mlp_bias, config.head_dim) == (True, True, 64)


def test_qwen3_moe(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen3-coder-30b-a3b")
    assert config.moe == MoEConfig(
        num_experts=128,
        experts_per_token=8,
        intermediate_size=768,
        normalize_weights=True,
        sparse_layers=(True,) * 48,
    )
    config = read(tmp_path, "qwen3-coder-30b-a3b", use_sliding_window=True, sliding_window=64)
    assert [layer.window for layer in config.layers] == [64] * 48


@pytest.mark.parametrize(("step", "dense"), [(1, []), (2, []), (1, [0, 3]), (3, [5]), (2, None)])
def test_sparse_layers_are_transformers(tmp_path: Path, step: int, dense: list[int] | None) -> None:
    theirs = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=7,
        decoder_sparse_step=step,
        mlp_only_layers=dense,
        num_experts=4,
        num_experts_per_tok=2,
    )
    theirs.save_pretrained(tmp_path)  # calls num_experts num_local_experts
    with torch.device("meta"):
        layers = Qwen3MoeForCausalLM(theirs).model.layers
    moe = read_target_config(tmp_path).moe
    assert moe is not None
    assert list(moe.sparse_layers) == [isinstance(layer.mlp, Qwen3MoeSparseMoeBlock) for layer in layers]
    assert (moe.num_experts, moe.experts_per_token, moe.normalize_weights) == (4, 2, False)


def test_gpt_oss_as_transformers_writes_it(tmp_path: Path) -> None:
    theirs = GptOssConfig(
        architectures=["GptOssForCausalLM"], num_hidden_layers=5, swiglu_limit=5.0, swiglu_alpha=1.5
    )
    theirs.save_pretrained(tmp_path)
    mine = read_target_config(tmp_path)
    assert_as_transformers(mine, theirs)
    assert mine.moe is not None
    assert (mine.moe.quantization, mine.moe.limit, mine.moe.alpha) == (None, 5.0, 1.5)
    del (written := json.loads((tmp_path / "config.json").read_text()))["layer_types"]
    assert read_target_config(write(tmp_path, written)).layers == mine.layers


QUANTIZED, LENGTH = "quantization_config.modules_to_not_convert", "original_max_position_embeddings"


def of_full_layers(**fields: Any) -> dict[str, Any]:
    """Gemma's fields for each of the layers that see all tokens."""
    return {str(i): fields for i in range(5, 30, 6)}


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama-3.1-8b", {"pretraining_tp": 2}, "pretraining_tp is 2, which"),
    ("llama-3.1-8b", {"quantization_config": {"quant_method": "torchao"}}, 'quant_method is "torchao": torchao'),
    *(
        (name, {f"{text}is_causal": False}, f"{text}is_causal is false, which")
        for name, text in (
            ("llama-3.1-8b", ""),
            ("qwen3-4b", ""),
            ("qwen3-coder-30b-a3b", ""),
            ("gpt-oss-20b", ""),
            ("qwen3-coder-next", ""),
            ("qwen3.5-4b", "text_config."),
            ("qwen3.5-35b-a3b", "text_config."),
        )
    ),
    ("qwen3.5-35b-a3b", {"text_config.norm_topk_prob": False}, "text_config.norm_topk_prob is false, which"),
    ("qwen3-coder-30b-a3b", {"num_experts": MISSING}, "num_experts or num_local_experts is missing"),
    ("qwen3-coder-30b-a3b", {"num_local_experts": 64}, "num_experts is 128, but num_local_experts is 64"),
    ("qwen3-coder-30b-a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, but there are"),
    ("qwen3-coder-30b-a3b", {"shared_expert_intermediate_size": 512}, "expert_intermediate_size is 512, which"),
    ("qwen3-coder-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers is 3, expected a list of integers"),
    ("gpt-oss-20b", {"quantization_config.quant_method": "awq"}, "quant_method is 'awq', supported"),
    ("gpt-oss-20b", {QUANTIZED: ["lm_head"]}, f"{QUANTIZED} lacks model.embed_tokens, model.layers.*.mlp.router"),
    ("gpt-oss-20b", {"quantization_config.group": 16}, "quantization_config.group is 16, which"),
    ("gpt-oss-20b", {"intermediate_size": 2890}, "intermediate_size is 2890, but MXFP4 needs"),
    ("gpt-oss-20b", {"rope_scaling": None}, "rope_scaling is missing, expected the YaRN parameters"),
    ("gpt-oss-20b", {"head_dim": None}, "head_dim is missing"),
    ("gpt-oss-20b", {"experts_per_token": 2}, "num_experts_per_tok is 4, but experts_per_token is 2"),
    ("gpt-oss-20b", {"sliding_window": None}, "layer_types[0] is 'sliding_attention', but"),
    ("ministral", {"rope_parameters.llama_4_scaling_beta": MISSING}, "llama_4_scaling_beta is missing"),
    ("ministral", {f"rope_parameters.{LENGTH}": MISSING}, f"{LENGTH} is missing"),
    ("ministral", {"rope_parameters.max_position_embeddings": 7}, "max_position_embeddings is 7"),
    ("ministral", {"rope_parameters": MISSING}, "rope_parameters is missing"),
    ("ministral", {"layer_types": ["full_attention"] * 4}, "layer_types is"),
    ("ministral", {"attention_bias": True}, "attention_bias is true"),
    *(
        ("gemma-4-26b-a4b", {f"text_config.{field}": value}, message)
        for field, value, message in (
            ("hidden_size_per_layer_input", 256, "E2B and E4B"),
            ("hidden_size_per_layer_input", MISSING, "is 256: the layers of E2B"),
            ("num_kv_shared_layers", 2, "E2B and E4B"),
            ("use_bidirectional_attention", "all", "use_bidirectional_attention is"),
            ("hidden_activation", "gelu", "hidden_activation is 'gelu'"),
            ("rope_parameters.full_attention", MISSING, "rope_parameters.full_attention is missing"),
            ("rope_parameters.sliding_attention.rope_type", "axial", "attention.rope_type is 'axial'"),
            ("rope_parameters.full_attention.partial_rotary_factor", 1.5, "rotary_factor is 1.5"),
            ("layer_types", ["linear_attention"] * 30, "layer_types[0] is 'linear_attention'"),
            ("sliding_window", MISSING, "sliding_window is missing"),
            ("per_layer_config", {"1": {"head_dim": 8}}, "per_layer_config.1 is"),
            ("per_layer_config", of_full_layers(sliding_window=8), "per_layer_config.5.sliding_window is 8"),
            ("per_layer_config", of_full_layers(num_key_value_heads=3), "does not divide the 16 heads"),
            ("num_experts", MISSING, "num_experts is missing"),
            ("top_k_experts", 129, "top_k_experts is 129"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), REFUSALS)
def test_refuses(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_target_config(write(tmp_path, changed(published(name), changes)))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_mxfp4_without_a_list_of_modules(tmp_path: Path) -> None:
    moe = read(tmp_path, "gpt-oss-20b", **{QUANTIZED: MISSING}).moe
    assert moe is not None
    assert moe.quantization == "mxfp4"
    moe = read(tmp_path, "gpt-oss-20b", quantization_config=MISSING, intermediate_size=2890).moe
    assert moe is not None
    assert moe.quantization is None


def test_known_configs_by_any_name() -> None:
    assert known_configs("gpt-oss-120b") == known_configs("openai/gpt-oss-120b")
    assert known_configs("qwen3-4b") == known_configs("z-lab/Qwen3-4B-DFlash-b16@main")
    with pytest.raises(CheckpointError, match=r"gpt-5: no pair has this name; known pairs: tiny"):
        known_configs("gpt-5")


@pytest.mark.parametrize(
    ("name", "per_token", "states"),
    [
        ("qwen3.6-35b-a3b", 20_480, 63e6),
        ("qwen3.5-122b-a10b", 24_576, 151e6),
        ("qwen3.5-397b-a17b", 30_720, 189e6),
    ],
)
def test_memory_of_a_request_is_as_others_report_it(name: str, per_token: int, states: float) -> None:
    """Two bytes for a number in a cache row, four in a state."""
    config = read_target_config(known_configs(name)[0])
    assert 4 * len(config.attention_layers) * config.num_key_value_heads * config.head_dim == per_token
    sizes = [layer.value_heads * layer.key_dim * layer.value_dim for layer in config.delta_layers]
    assert 4 * sum(sizes) == pytest.approx(states, rel=0.005)


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096}
CASES: list[tuple[str, float, dict[str, Any]]] = [
    ("default", 1e6, {}), ("default", 1e4, {}), ("linear", 1e4, {"factor": 4.0}), ("llama3", 5e5, LLAMA3),
    ("llama3", 1e6, {"factor": 32, "low_freq_factor": 2, "high_freq_factor": 8}),
    ("yarn", 150000.0, YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}), ("yarn", 150000.0, YARN),
    ("yarn", 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 0.8}),
    ("yarn", 1e4, YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.8}),
    ("yarn", 1e4, YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}),
    ("yarn", 1e4, {"factor": 1.0, "beta_fast": 20, "beta_slow": 2}),
    ("yarn", 20.0, YARN | {"beta_fast": 128.0}),  # the slow end lies beyond the head
    ("proportional", 1e6, {"partial_rotary_factor": 0.25}),
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("rope_type", "theta", "parameters"), CASES)
def test_matches_transformers(
    rope_type: str, theta: float, parameters: dict[str, Any], head_dim: int
) -> None:
    config = Qwen3Config(
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **parameters},
    )
    expected = Qwen3RotaryEmbedding(config)
    frequencies, factor = inverse_frequencies(RopeConfig(rope_type, theta, parameters), head_dim, 131072)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (head_dim // 2,)
    # 4e-7 is three units in the last place: torch and NumPy round powers differently.
    np.testing.assert_allclose(frequencies, expected.inv_freq.numpy(), rtol=4e-7, atol=0)
    assert factor == pytest.approx(expected.attention_scaling, rel=1e-12)
