"""Windows much shorter than the sequences, on the engine that runs plans, over a stand-in for TensorRT.

Tokens must equal those of the same pair on ONNX Runtime.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.profiles import aligned_rows
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.engines.tensorrt.test_runtime import BLOCK, FLOAT32, here  # noqa: F401  # a fixture

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, MOST, CHUNK, SLOTS = 20, 420, 48, 3
WINDOWED = {"sliding_window": WINDOW, "head_dim": 32}
PAIRS: dict[str, tuple[Any, Any, int]] = {
    "chains": (
        partial(make_target, layers=2, favourites=6, layer_types=(SLIDING, FULL), **WINDOWED),
        partial(make_drafter, layer_types=(SLIDING, FULL), **WINDOWED),
        1,
    ),
    "trees and sinks": (
        partial(make_gpt_oss, favourites=6, quantized=False, sliding_window=WINDOW, num_hidden_layers=2),
        partial(make_gpt_oss_drafter, layers=1),
        2,
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def bundles(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    here: Any,  # noqa: F811
) -> tuple[Bundle, Bundle]:
    directory, (target, drafter, width) = tmp_path_factory.mktemp("windows"), PAIRS[request.param]
    target(directory / "target", max_position_embeddings=1024)
    drafter(directory / "drafter", directory / "target", block_size=BLOCK, taps=(0, 1))
    sources = str(directory / "target"), str(directory / "drafter")
    settings: dict[str, Any] = {"max_seq_len": MOST, "tree_width": width}
    plain = build(*sources, directory / "onnxruntime", **settings)
    options = TensorRTOptions(max_batch_size=SLOTS, prefill_chunk=CHUNK)
    settings |= {"engine": "tensorrt", "precision": FLOAT32, "options": options}
    return plain, build(*sources, directory / "tensorrt", **settings)


def test_the_tokens_are_those_of_onnxruntime(bundles: tuple[Bundle, Bundle]) -> None:
    """Prompts with common beginnings, in batches of mixed lengths, three times as long as the rows that are kept."""
    rng = np.random.default_rng(2)
    common = rng.integers(0, VOCAB, 300).tolist()
    prompts = [common[:n] + rng.integers(0, VOCAB, 20).tolist() for n in (300, 40, 170, 290)]
    asked = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=n, seed=i, ignore_eos=True)
        for i, n in enumerate((90, 150, 40, 60))
    ]
    (kind,) = {
        (kind.window, kind.stride, kind.rows)
        for kind in bundles[1].cache_kinds("target")
        if kind.window is not None
    }
    assert kind == (WINDOW, 128, aligned_rows(WINDOW - 1 + 127 + CHUNK + 1))
    with LLM(bundles[0].path, max_batch_size=SLOTS, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts, asked, speculate=False)]
    with LLM(bundles[1].path, max_batch_size=SLOTS) as llm:
        pair: Any = llm._runtime.pair
        pair.arrays.samples = False  # Triton's interpreter is slow
        for each in pair.target.rows.kinds:
            for rows in each.pool.arrays.values():
                assert rows.shape[2] == each.kind.rows
        trees = {"tree_nodes": BLOCK} if bundles[1].manifest["tree_width"] > 1 else {}
        for block_length in (BLOCK, 1, 4):
            found = llm.generate(
                prompts,
                asked,
                **(trees if block_length == BLOCK and trees else {"block_length": block_length}),
            )
            assert [c.token_ids for c in found] == expected
        assert sum(c.statistics.num_accepted_tokens for c in found) > 0
        assert max(max(each.bases.values()) for each in pair.target.rows.kinds if each.kind.window) >= 256
        assert max(c.statistics.num_cached_tokens for c in found) > 128
