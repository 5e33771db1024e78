"""Muse Glimmer and its drafters on ONNX Runtime, compared with Transformers' classes and its DFlash loop in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MuseGlimmerAssistantModel, MuseGlimmerForConditionalGeneration
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.doubles.checkpoints import MASK, VOCAB, make_drafter, write_json
from tests.doubles.kind_checkpoints import make_dflash2
from tests.doubles.muse_checkpoints import make_assistant, make_muse
from tests.doubles.reference import Drafter, target_outputs
from tests.doubles.reference_kinds import DFlash2
from tests.doubles.text_checkpoints import edit_config, load_text
from tests.models.test_families import LONG, test_long_positions  # noqa: F401
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
    test_drafter,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
    test_target_verifies_a_block_and_rolls_back,
)

SLIDING, FULL = "sliding_attention", "full_attention"
# name: fields of the text model, and of z-lab's drafter
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}),
    "other sizes and places": (
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_key_value_heads": 1,
            "num_hidden_layers": 5,
            "head_dim": 24,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": [FULL, SLIDING, FULL, SLIDING, FULL],
            "layer_rope_theta": [10000.0, 10000.0, 0, 0, 10000.0],
            "qk_scale_factor": 2.5,
            "post_norm_eps": 0.1,
        },
        {"taps": (0, 3), "block_size": 5, "head_dim": 12},
    ),
}


def load(directory: Path) -> Any:
    """The target as Transformers reads it. `model.embed_tokens` gives drafters the rows without their norm."""
    model = load_text(directory)
    table = model.model.language_model.embed_tokens
    model.model.embed_tokens = torch.nn.Embedding.from_pretrained(table.weight)
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory, (fields, drafter_fields) = tmp_path_factory.mktemp("muse"), CASES[request.param]
    target = make_muse(directory / "target", **fields)
    drafter = make_drafter(directory / "drafter", target, **drafter_fields)
    bundle = build(str(target), str(drafter), directory / "bundle", max_seq_len=LONG + 40)
    return Case(bundle, load(target), Drafter(drafter), VOCAB)


def test_no_part_is_idle(tmp_path: Path) -> None:
    """The parity means something: without any part, logits move far beyond the bound."""
    directory, tokens = make_muse(tmp_path / "target"), list(range(40))
    expected, _ = target_outputs(load_text(directory), tokens)

    def without(change: Callable[[Any], Any]) -> float:
        model = load_text(directory)
        with torch.no_grad():
            change(model)
        return float((target_outputs(model, tokens)[0] - expected).abs().max())

    def layers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda model: [change(layer) for layer in model.model.language_model.layers]

    parts: dict[str, Callable[[Any], Any]] = {
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
    }
    assert {name for name, change in parts.items() if without(change) < 0.05} == set()


@pytest.mark.parametrize("favourites", [6, 0])
def test_tokens_and_accepted_drafts_are_those_of_transformers(
    tmp_path: Path, favourites: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own DFlash loop with Meta's drafter, beyond both windows: 64 greedy tokens, and the accepted drafts
    of each round.
    """
    target = make_muse(tmp_path / "target", favourites=favourites, sliding_window=20)
    drafter = make_assistant(tmp_path / "drafter")
    model = MuseGlimmerForConditionalGeneration.from_pretrained(target, attn_implementation="eager").eval()
    theirs = MuseGlimmerAssistantModel.from_pretrained(drafter, attn_implementation="eager").eval()
    rounds: list[int] = []
    get_candidates = DFlashTokenCandidateGenerator.get_candidates

    def counted(self: Any, *args: Any, n_last_matches: int, **kwargs: Any) -> Any:
        rounds.append(n_last_matches)
        return get_candidates(self, *args, n_last_matches=n_last_matches, **kwargs)

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", counted)
    prompt = np.random.default_rng(0).integers(0, 300, 50).tolist()
    common = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    ids = torch.tensor([prompt])
    with torch.no_grad():
        plain = model.generate(ids, **common)[0, len(prompt) :].tolist()
        drafted = model.generate(ids, assistant_model=theirs, speculation_type="dflash", **common)
    assert drafted[0, len(prompt) :].tolist() == plain
    build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=256)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with LLM(tmp_path / "bundle", max_batch_size=2, prefill_chunk=16, threads=1) as llm:
        assert list(llm.generate(prompt, params, speculate=False).token_ids) == plain
        chunks = list(llm.stream(prompt, params, block_length=8))
    assert [token for chunk in chunks for token in chunk.token_ids] == plain
    ours = [len(chunk.token_ids) - 1 for chunk in chunks if chunk.token_ids]
    # Their first call only follows, as our first chunk, and the last round may be cut.
    assert ours[:-1] == rounds[1 : len(ours)]
    assert sum(ours) > 0 or not favourites


def test_dflash2_of_this_target(tmp_path: Path) -> None:
    """z-lab's other drafter: its logits have a multiplier and a soft-cap of their own, and rows have no norm."""
    target = make_muse(tmp_path / "target", favourites=6)
    drafter = make_dflash2(tmp_path / "drafter", target, softcap=20.0, multiplier=0.5)
    model, reference = load(target), DFlash2(drafter)
    tokens = np.random.default_rng(1).integers(0, 300, 25).tolist()
    expected = reference.propose(model, target_outputs(model, tokens, reference.taps)[1], 7)
    bundle = build(str(target), str(drafter), tmp_path / "bundle", max_seq_len=128)
    engine = Case(bundle, model, reference, VOCAB).engine("drafter.onnx")
    features = target_outputs(model, tokens, reference.taps)[1][None].numpy()
    block = np.array([[7] + [MASK] * 7])
    out = engine.run(
        {"features": features, "n_features": np.array([25]), "start": np.array([0]), "block": block}
    )
    assert out["draft_tokens"][0, :, 0].tolist() == expected.tokens
    assert np.abs(out["draft_logprobs"][0, :, 0] - expected.logprobs.numpy()).max() <= 2e-4


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
    ("field", "value"),
    [
        ("layer_rope_theta", [10000.0] * 6),
        ("layer_rope_theta", [5000.0] * 5),
        ("layer_rope_theta", "no"),
        ("hidden_activation", "gelu"),
        ("qk_scale_factor", 0),
        ("output_multiplier", "1"),
        ("final_logit_softcapping", -20),
        ("post_norm_eps", 0),
        ("sliding_window", 0),
        ("layer_types", [SLIDING] * 6),
        ("layer_types", [SLIDING] * 4 + ["chunked_attention"]),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("model_type", "muse_spark_text"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named(tmp_path: Path, field: str, value: Any) -> None:
    target = make_muse(tmp_path / "target")
    edit_config(target, {field: value})
    with pytest.raises(CheckpointError, match=field):
        read_target_config(target)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 1),
        ("mask_token_id", -1),
        ("target_layer_ids", []),
        ("target_layer_ids", [1, 1]),
        ("layer_types", [SLIDING] * 2),
        ("hidden_act", "gelu"),
    ],
)
def test_a_field_of_the_drafter_that_cannot_be_honoured_is_named(
    tmp_path: Path, field: str, value: Any
) -> None:
    drafter = make_assistant(tmp_path / "drafter")
    fields = json.loads((drafter / "config.json").read_text()) | {field: value}
    write_json(drafter / "config.json", fields)
    with pytest.raises(CheckpointError, match=field):
        read_drafter_config(drafter)
