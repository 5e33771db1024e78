"""Gemma 4 on ONNX Runtime, compared with Transformers' own classes in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building.build import build
from tests.doubles.checkpoints import VOCAB, make_drafter, write_json
from tests.doubles.reference import Drafter
from tests.doubles.text_checkpoints import (
    EXPERTS,
    GEMMA,
    GEMMA_IMAGES,
    UNIFIED,
    UNIFIED_IMAGES,
    load_text,
    make_gemma,
)
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    Case,
    test_drafter,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
    test_target_verifies_a_block_and_rolls_back,
)

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
