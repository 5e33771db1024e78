"""Muse Glimmer and its drafters on ONNX Runtime, compared with Transformers' classes and its DFlash loop in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_trt.building.build import build
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.doubles.checkpoints import VOCAB, make_drafter, write_json
from tests.doubles.muse_checkpoints import make_assistant, make_muse
from tests.doubles.reference import Drafter, target_outputs
from tests.doubles.text_checkpoints import edit_config, load_text
from tests.models.test_families import LONG, test_long_positions  # noqa: F401
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
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
