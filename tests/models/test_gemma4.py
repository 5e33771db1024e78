"""Gemma 4 on ONNX Runtime, compared with Transformers' own classes in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.onnxruntime.engine import OnnxRuntimeEngine
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.reference import Drafter, target_outputs
from tests.doubles.text_checkpoints import (
    EXPERTS,
    GEMMA,
    GEMMA_IMAGES,
    UNIFIED,
    UNIFIED_IMAGES,
    edit_config,
    load_text,
    make_gemma,
)
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
    assert_close,
    ints,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
    test_target_verifies_a_block_and_rolls_back,
)

SLIDING, FULL = "sliding_attention", "full_attention"
TOKENS = list(range(30))
# name: (architecture, settings of the target)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "31B": (GEMMA_IMAGES, {}),
    "26B-A4B": (GEMMA_IMAGES, EXPERTS),
    "12B": (UNIFIED_IMAGES, {"hidden_size": 48, "num_attention_heads": 2}),
    "values of their own": (
        GEMMA,
        {"attention_k_eq_v": False, "hidden_size": 40, "dtype": "float16", "global_head_dim": 24},
    ),
    "experts, untied, no soft-cap": (
        GEMMA,
        EXPERTS
        | {
            "top_k_experts": 4,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2 + ["full_attention"],
            "num_hidden_layers": 5,
            "attention_bias": True,
        },
    ),
    "heads by layer": (
        UNIFIED,
        {
            "per_layer_config": {
                **{i: {"head_dim": 24, "num_key_value_heads": 4} for i in range(5)},
                5: {"head_dim": 64},
            }
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("gemma"), request.param)


def make_case(directory: Path, name: str, **changes: Any) -> Case:
    architecture, settings = CASES[name]
    target = make_gemma(directory / "target", architecture, **(settings | changes))
    drafter = make_drafter(directory / "drafter", target)
    bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=96)
    return Case(bundle, load_text(target), Drafter(drafter), VOCAB)


@pytest.mark.parametrize(("name", "favourites"), [("26B-A4B", 0), ("12B", 8)])
def test_64_tokens_behind_many_windows(tmp_path: Path, name: str, favourites: int) -> None:
    """Greedy tokens are Transformers' own, with and without drafts, where rows of windowed layers are dropped."""
    architecture, settings = CASES[name]
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


def test_no_part_is_idle(tmp_path: Path) -> None:
    """The parity above means something: without any part, logits move far beyond the bound."""
    directory, tokens = make_gemma(tmp_path / "target", **EXPERTS), list(range(40))
    expected, _ = target_outputs(load_text(directory), tokens)

    def without(change: Callable[[Any], Any]) -> float:
        model = load_text(directory)
        with torch.no_grad():
            change(model)
        return float((target_outputs(model, tokens)[0] - expected).abs().max())

    def layers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda model: [change(layer) for layer in model.model.layers]

    parts: dict[str, Callable[[Any], Any]] = {
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
    }
    assert {name for name, change in parts.items() if without(change) < 0.02} == set()


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
    engine = OnnxRuntimeEngine(directory / "target.onnx", slots=1, capacity=64, threads=1)
    feeds = {"tokens": ints(TOKENS), "start": ints(0), "rows": ints(list(range(len(TOKENS))))}
    assert_close(engine.run(feeds)["logits"][0], expected)
