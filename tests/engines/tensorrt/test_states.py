"""Hybrid targets on the engine that runs plans, over a stand-in for TensorRT: states beside rows, in slots.

Tokens must equal those of the same pair on ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.pair import PassRule
from dflash_trt.engines.device.caches import DeviceStates
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import BundleError
from tests.doubles.checkpoints import make_drafter
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid
from tests.engines.tensorrt.test_runtime import FLOAT32, here  # noqa: F401  # a fixture

BLOCK = 6
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, here: Any) -> tuple[Bundle, Bundle]:  # noqa: F811
    """One hybrid pair, built for ONNX Runtime and for TensorRT."""
    directory = tmp_path_factory.mktemp("states")
    target = make_hybrid(directory / "target", DENSE, favourites=6, num_hidden_layers=3, layer_types=LAYERS)
    drafter = make_drafter(directory / "drafter", target, block_size=BLOCK, layers=1, taps=(0, 1))
    sources, options = (str(target), str(drafter)), TensorRTOptions(max_batch_size=4, prefill_chunk=32)
    return build(*sources, directory / "onnxruntime", max_seq_len=140), build(
        *sources,
        directory / "tensorrt",
        engine="tensorrt",
        max_seq_len=140,
        precision=FLOAT32,
        options=options,
    )


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 300, n).tolist() for n in (3, 50, 17, 1, 70)]


def params() -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.8 * (n % 2), max_tokens=n, seed=n, ignore_eos=True)
        for n in (40, 9, 60, 21, 12)
    ]


def test_the_tokens_are_those_of_onnxruntime(bundles: tuple[Bundle, Bundle]) -> None:
    """Five requests in three slots. Later rounds reuse prefixes at the boundaries where states were kept."""
    with LLM(bundles[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts(), params())]
    with LLM(bundles[1].path, prefix_cache_bytes=1 << 22) as llm:
        pair: Any = llm._runtime.pair
        for block_length in (None, 1, BLOCK):
            found = llm.generate(prompts(), params(), block_length=block_length)
            assert [c.token_ids for c in found] == expected
        assert sum(c.statistics.num_accepted_tokens for c in found) > 0
        assert [c.statistics.num_cached_tokens for c in found][1] == 49
        states = pair.target.caches.states
        assert isinstance(states, DeviceStates)
        pair.arrays.wait()
        np.testing.assert_array_equal(states._on_device.cpu().numpy(), states._positions)
        llm._runtime.scheduler.follow(PassRule((4, BLOCK)))  # the copies of a row enter no state
        found = llm.generate(prompts(), params(), block_length=3)
        assert [c.token_ids for c in found] == expected


def test_states_that_do_not_fill_whole_units_are_refused_at_any_batch(tmp_path: Path, here: Any) -> None:  # noqa: F811
    """One slot's states follow those of the layer before."""
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
    target = make_hybrid(tmp_path / "target", favourites=6, num_hidden_layers=3, layer_types=LAYERS, **heads)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=3, layers=1, taps=(0, 1))
    settings: dict[str, Any] = {"engine": "tensorrt", "max_seq_len": 64, "precision": FLOAT32}
    bundle = build(str(target), str(drafter), tmp_path / "bundle", **settings)
    for batch in (1, 2):
        with pytest.raises(
            BundleError, match=r"conv_state\.0 .* 576 bytes .* multiple of 256 bytes; build for ONNX"
        ):
            LLM(bundle.path, max_batch_size=batch)
