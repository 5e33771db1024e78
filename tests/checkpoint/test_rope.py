"""Inverse frequencies, compared with Transformers bit for bit, up to the last place of one power."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_trt.checkpoint.rope import RopeConfig, inverse_frequencies

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
