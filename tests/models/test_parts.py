"""What the parity of test_families.py means: no part of a family is idle, and edits do what they do in Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.target import build_target
from tests.doubles.checkpoints import VOCAB, make_drafter, write_json
from tests.doubles.family_checkpoints import make_gpt_oss
from tests.doubles.muse_checkpoints import make_assistant, make_muse
from tests.doubles.reference import Drafter, decode, target_outputs
from tests.doubles.text_checkpoints import (
    EXPERTS,
    GEMMA_IMAGES,
    MINISTRAL_IMAGES,
    UNIFIED_IMAGES,
    edit_config,
    load_text,
    make_gemma,
    make_ministral,
)
from tests.models.test_families import load
from tests.models.test_parity import Case, assert_close, ints

SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS = list(range(40))


def layers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The change, for every layer of a model."""
    return lambda model: [change(x) for x in getattr(model.model, "language_model", model.model).layers]


# By family: without each of its parts, logits move by this much at least.
PARTS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], float, dict[str, Callable[[Any], Any]]]] = {
    "gpt-oss": (make_gpt_oss, load, 0.05, {
        "sinks": layers(lambda layer: layer.self_attn.sinks.fill_(-100)),
        "attention bias": layers(lambda layer: layer.self_attn.k_proj.bias.zero_()),
        "output bias": layers(lambda layer: layer.self_attn.o_proj.bias.zero_()),
        "router bias": layers(lambda layer: layer.mlp.router.bias.zero_()),
        "gate and up bias": layers(lambda layer: layer.mlp.experts.gate_up_proj_bias.zero_()),
        "down bias": layers(lambda layer: layer.mlp.experts.down_proj_bias.zero_()),
        "clamp": layers(lambda layer: setattr(layer.mlp.experts, "limit", 1e9)),
        "alpha": layers(lambda layer: setattr(layer.mlp.experts, "alpha", 1.0)),
    }),
    "muse glimmer": (make_muse, load_text, 0.05, {
        "gate": layers(lambda layer: layer.self_attn.gate_proj.weight.zero_()),
        "factor of queries": layers(lambda layer: setattr(layer.self_attn, "qk_scale_factor", 1.0)),
        "norm after attention": layers(lambda layer: layer.post_attention_layernorm.weight.zero_()),
        "norm of rows": lambda model: setattr(
            model.model.language_model.embed_tokens, "embed_norm", torch.nn.Identity()
        ),
        "layers without positions": lambda model: setattr(
            model.model.language_model.config, "layer_rope_theta", [1.0] * 5
        ),
        "multiplier": lambda model: setattr(model.config.text_config, "output_multiplier", 1.0),
        "soft-cap": lambda model: setattr(model.config.text_config, "final_logit_softcapping", 100.0),
    }),
    "gemma": (lambda path: make_gemma(path, **EXPERTS), load_text, 0.02, {
        "layer scalar": layers(lambda layer: layer.layer_scalar.fill_(1)),
        "norm of values": layers(lambda layer: setattr(layer.self_attn, "v_norm", torch.nn.Identity())),
        "norm after attention": layers(lambda layer: layer.post_attention_layernorm.weight.fill_(1)),
        "norm after the MLP": layers(lambda layer: layer.post_feedforward_layernorm_1.weight.fill_(1)),
        "norm before experts": layers(lambda layer: layer.pre_feedforward_layernorm_2.weight.fill_(1)),
        "scale of an expert": layers(lambda layer: layer.router.per_expert_scale.fill_(1)),
        "scale of the router's input": layers(lambda layer: layer.router.scale.fill_(1)),
        "scale of attention": layers(lambda layer: setattr(layer.self_attn, "scaling", 0.5)),
        "RoPE of a part": lambda model: model.model.rotary_emb.full_attention_inv_freq.zero_(),
        "soft-cap": lambda model: setattr(model.config, "final_logit_softcapping", 60.0),
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", PARTS)
def test_no_part_is_idle(tmp_path: Path, family: str) -> None:
    make, load_model, least, parts = PARTS[family]
    directory = make(tmp_path / "target")
    expected, _ = target_outputs(load_model(directory), TOKENS)

    def without(change: Callable[[Any], Any]) -> float:
        model = load_model(directory)
        with torch.no_grad():
            change(model)
        return float((target_outputs(model, TOKENS)[0] - expected).abs().max())

    assert {name for name, change in parts.items() if without(change) < least} == set()


HONOURED: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 3},
    "theta": {"rope_parameters.sliding_attention.rope_theta": 100.0},
    "theta of all": {"rope_parameters.full_attention.rope_theta": 100.0},
    "share of RoPE": {"rope_parameters.full_attention.partial_rotary_factor": 0.5},
    "factor of RoPE": {"rope_parameters.full_attention.factor": 4.0},
    "soft-cap": {"final_logit_softcapping": 5.0},
    "no soft-cap": {"final_logit_softcapping": None},
    "fewer experts": {"top_k_experts": 1},
    "epsilon": {"rms_norm_eps": 0.5},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("written") / "target", **EXPERTS)


@pytest.mark.parametrize("edit", HONOURED)
def test_edits_change_the_same_as_in_transformers(written: Path, tmp_path: Path, edit: str) -> None:
    directory = copytree(written, tmp_path / "target")
    before, _ = target_outputs(load_text(directory), TOKENS)
    edit_config(directory, HONOURED[edit])
    expected, _ = target_outputs(load_text(directory), TOKENS)
    assert (expected - before).abs().max() > 0.02
    checkpoint, config = Checkpoint(directory), read_target_config(directory)
    model = build_target(config, checkpoint, (0,), OnnxRuntime(), folder=".")
    ir.save(model, directory / "target.onnx")
    engine = OnnxRuntimeRunner(directory / "target.onnx", slots=1, capacity=64, threads=1)
    feeds = {"tokens": ints(TOKENS), "start": ints(0), "rows": ints(list(range(len(TOKENS))))}
    assert_close(engine.run(feeds)["logits"][0], expected)


@pytest.mark.parametrize(
    ("architecture", "settings", "favourites"),
    [(GEMMA_IMAGES, EXPERTS, 0), (UNIFIED_IMAGES, {"hidden_size": 48, "num_attention_heads": 2}, 8)],
)
def test_64_tokens_behind_many_windows(
    tmp_path: Path, architecture: str, settings: dict[str, Any], favourites: int
) -> None:
    """Greedy tokens are Transformers' own, with and without drafts, where rows of windowed layers are dropped."""
    # Rows move down by 128. A tied model with random weights would repeat one token.
    settings = settings | {
        "head_dim": 128,
        "sliding_window": 20,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    }
    target = make_gemma(tmp_path / "target", architecture, favourites=favourites, **settings)
    drafter = make_drafter(tmp_path / "drafter", target, layer_types=[SLIDING, FULL], sliding_window=12)
    bundle = build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=1024)
    assert any(kind["window"] and kind["rows"] < 700 for kind in bundle.manifest["caches"]["target"])
    model, prompt = load_text(target), np.random.default_rng(0).integers(0, 300, 800).tolist()
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None)
    expected = ids[0, len(prompt) :].tolist()
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with LLM(tmp_path / "bundle", max_batch_size=3, prefill_chunk=64, threads=1) as llm:
        for speculate in (True, False):
            found = llm.generate([prompt, prompt[:40]], params, speculate=speculate, block_length=8)
            assert list(found[0].token_ids) == expected
            accepted = [each.statistics.num_accepted_tokens for each in found]
            assert sum(accepted) > 0 or not (speculate and favourites)


def test_beyond_16384_positions(tmp_path: Path) -> None:
    """As published: the scale of queries is 1 up to there. YaRN's frequencies differ from plain RoPE's throughout."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_ministral(tmp_path / "target", dtype="float32", **sizes)
    drafter = make_drafter(tmp_path / "drafter", target)
    bundle = build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=16500)
    case = Case(bundle, load_text(target), Drafter(drafter), VOCAB)
    tokens, engine = case.tokens(16394), case.engine("target.onnx")
    case.target.set_attn_implementation("sdpa")  # eager attention would hold all scores
    with torch.no_grad():
        before = case.target(torch.tensor([tokens[:16374]]), logits_to_keep=1).past_key_values

    def logits(growth: float) -> torch.Tensor:
        case.target.config.rope_parameters["llama_4_scaling_beta"] = growth
        with torch.no_grad():
            block = torch.tensor([tokens[16374:]])
            return case.target(block, past_key_values=deepcopy(before)).logits[0]

    expected = logits(0.1)
    assert (logits(0.0) - expected)[10:].abs().max() > 0.05
    for start, end in ((0, 8192), (8192, 16374), (16374, 16394)):
        rows = list(range(end - start))[-20:]
        found = engine.run({"tokens": ints(tokens[start:end]), "start": ints(start), "rows": ints(rows)})
    assert_close(found["logits"][0], expected)


def test_fp8_with_one_scale_per_tensor(tmp_path: Path) -> None:
    """As Mistral publishes it: scales of weights and inputs. Tokens are those of the same numbers in Transformers."""
    target = make_ministral(tmp_path / "target", MINISTRAL_IMAGES, favourites=6)
    case_drafter = make_drafter(tmp_path / "drafter", target)
    model = load_text(target)
    layers = as_fp8(target)
    for name, layer in model.model.language_model.named_modules():
        if name in layers:
            layer.weight.data, scale = layers[name]
            layer.register_forward_pre_hook(lambda _, x, s=scale: (rounded(x[0], s),))
    prompt = [3, 5, 7, 11, 13]
    expected = decode(model, prompt, 24).tokens
    sources = str(target), str(case_drafter)
    bundle = build(*sources, tmp_path / "bundle", engine="torch", precision=Precision(target="fp32"))
    with LLM(bundle.path) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        for speculate in (True, False):
            assert list(llm.generate(prompt, params, speculate=speculate).token_ids) == expected


def as_fp8(directory: Path) -> dict[str, tuple[torch.Tensor, float]]:
    """Store the text model's linear layers in FP8. Returns their weights in float32 and the scales of their inputs."""
    file, config = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
    tensors, layers = load_file(file), {}
    for name in [n for n in tensors if n.startswith("language_model.model.layers") and "norm" not in n]:
        layer = name.removesuffix(".weight")
        weight = tensors[name].float()
        scale = (weight.abs().max() / 448).bfloat16()
        tensors[name] = (weight / scale.float()).to(torch.float8_e4m3fn)
        tensors |= {f"{layer}.weight_scale_inv": scale, f"{layer}.activation_scale": torch.tensor(0.0625)}
        short = layer.removeprefix("language_model.model.")
        layers[short] = tensors[name].float() * scale.float(), 0.0625
    save_file(tensors, file, metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    write_json(directory / "config.json", config)
    return layers


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """A field that the file leaves out has the value of Transformers' configuration."""
    target = make_muse(tmp_path / "target", sliding_window=2048, output_multiplier=0.19611613513818404)
    expected = read_target_config(target)
    edit_config(
        target,
        dict.fromkeys(
            ("layer_types", "layer_rope_theta", "qk_scale_factor", "output_multiplier", "post_norm_eps")
        ),
    )
    edit_config(target, {"sliding_window": None, "rope_parameters": None})
    assert read_target_config(target) == expected
    drafter = make_assistant(tmp_path / "drafter", sliding_window=2048)
    whole = read_drafter_config(drafter, expected)
    assert (whole.vocab_size, whole.target_layer_ids) == (VOCAB, (0, 2, 3))
    fields = json.loads((drafter / "config.json").read_text())
    for name in ("layer_types", "sliding_window", "rope_parameters"):
        del fields[name]
    write_json(drafter / "config.json", fields)
    assert read_drafter_config(drafter, expected) == whole


@pytest.mark.parametrize(
    ("role", "field", "value"),
    [
        *(("target", *each) for each in (
            ("layer_rope_theta", [10000.0] * 6), ("layer_rope_theta", [5000.0] * 5), ("layer_rope_theta", "no"),
            ("hidden_activation", "gelu"), ("qk_scale_factor", 0), ("output_multiplier", "1"),
            ("final_logit_softcapping", -20), ("post_norm_eps", 0), ("sliding_window", 0),
            ("layer_types", [SLIDING] * 6), ("layer_types", [SLIDING] * 4 + ["chunked_attention"]),
            ("num_key_value_heads", 3), ("head_dim", 15), ("model_type", "muse_spark_text"),
        )),
        *(("drafter", *each) for each in (
            ("block_size", 1), ("mask_token_id", -1), ("target_layer_ids", []), ("target_layer_ids", [1, 1]),
            ("layer_types", [SLIDING] * 2), ("hidden_act", "gelu"),
        )),
    ],
)  # fmt: skip
def test_a_field_of_muse_glimmer_that_cannot_be_honoured_is_named(
    tmp_path: Path, role: str, field: str, value: Any
) -> None:
    directory = (make_muse if role == "target" else make_assistant)(tmp_path / role)
    edit_config(directory, {field: value})
    with pytest.raises(CheckpointError, match=field):
        (read_target_config if role == "target" else read_drafter_config)(directory)
