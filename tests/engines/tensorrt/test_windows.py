"""Windows much shorter than the sequences, on the engine that runs plans, over a stand-in for TensorRT.

Tokens must equal those of the same pair on ONNX Runtime.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.device.sizes import ROW_UNIT
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.inventory import take_inventory
from dflash_trt.planning import memory
from dflash_trt.planning.gpus import find_gpu
from dflash_trt.planning.weights import Settings
from tests.doubles.checkpoints import VOCAB, make_drafter
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter
from tests.doubles.hybrid_checkpoints import DENSE, make_hybrid
from tests.doubles.two_engines import FLOAT32, for_both
from tests.engines.tensorrt.test_runtime import BLOCK, here  # noqa: F401  # a fixture

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
WINDOW, MOST, CHUNK, SLOTS = 20, 420, 48, 4
WINDOWED = {"sliding_window": WINDOW, "head_dim": 32}
PAIRS: dict[str, tuple[Any, Any, int]] = {
    "beside states, in both directions": (
        partial(
            make_hybrid, architecture=DENSE, favourites=6, num_hidden_layers=2, layer_types=[LINEAR, FULL]
        ),
        partial(make_drafter, layer_types=(SLIDING, SLIDING), is_causal=False, **WINDOWED),
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
    pair, options = (directory / "target", directory / "drafter"), TensorRTOptions((), SLOTS, CHUNK)
    return for_both(directory, *pair, "tensorrt", options, max_seq_len=MOST, tree_width=width)


def test_the_tokens_are_those_of_onnxruntime(bundles: tuple[Bundle, Bundle]) -> None:
    """Prompts with common beginnings, in batches of mixed lengths, three times as long as the rows that are kept."""
    rng = np.random.default_rng(2)
    common = rng.integers(0, VOCAB, 300).tolist()
    prompts = [common[:n] + rng.integers(0, VOCAB, 20).tolist() for n in (300, 40, 170, 290)]
    asked = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=n, seed=i, ignore_eos=True)
        for i, n in enumerate((90, 150, 40, 60))
    ]
    for role, written in (("target", CHUNK + BLOCK + 1), ("drafter", CHUNK + 2 * BLOCK + 1)):
        for kind in bundles[1].cache_kinds(role):
            if kind.window is not None:
                expected_rows = -(-(WINDOW - 1 + 127 + written) // ROW_UNIT) * ROW_UNIT
                assert (kind.window, kind.stride, kind.rows) == (WINDOW, 128, expected_rows)
    with LLM(bundles[0].path, max_batch_size=SLOTS, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts, asked, speculate=False)]
    with LLM(bundles[1].path, max_batch_size=SLOTS) as llm:
        pair: Any = llm.runtime.pair
        kinds = [*pair.target.caches.kinds, *pair.drafter.caches.kinds]
        for each in kinds:
            for rows in each.pool.arrays.values():
                assert rows.shape[2] == each.kind.rows
        trees = {"tree_nodes": BLOCK} if bundles[1].manifest["tree_width"] > 1 else {}
        for block_length in (BLOCK, 4):
            found = llm.generate(
                prompts,
                asked,
                **(trees if block_length == BLOCK and trees else {"block_length": block_length}),
            )
            assert [c.token_ids for c in found] == expected
        assert sum(c.statistics.num_accepted_tokens for c in found) > 0
        assert max(max(held.base for held in each.records) for each in kinds if each.kind.window) >= 256
        assert max(c.statistics.num_cached_tokens for c in found) > 128


def test_a_pass_leaves_the_tokens_of_idle_slots(bundles: tuple[Bundle, Bundle]) -> None:
    """Three sequences are run as four. Of the fourth slot, only rows after those of its tokens change."""
    length = 2 * CHUNK + 40
    with LLM(bundles[1].path, max_batch_size=SLOTS) as llm:
        pair: Any = llm.runtime.pair
        engines = pair.target, pair.drafter.runner
        for slot in range(SLOTS):
            tokens = np.random.default_rng(slot).integers(0, VOCAB, length).tolist()
            for start in range(0, length, CHUNK):
                pair.prefill(tokens[start : start + CHUNK], start, slot, draft=True)

        def held() -> list[Any]:
            """All that belongs to the fourth slot's tokens, and the rows after them."""
            pair.arrays.wait()
            kinds = [each for engine in engines for each in engine.caches.kinds]
            rows = [(each.pool.take(3, 0, each.kind.rows), length - each.records[3].base) for each in kinds]
            states = [pool.now[:, 3].clone() for pool in getattr(pair.target.caches.states, "_pools", ())]
            return [
                [array[:, :end] for arrays, end in rows for array in arrays] + states,
                [array[:, end:] for arrays, end in rows for array in arrays],
            ]

        before = held()
        for nodes in (1, 2, BLOCK):
            pair.dummy_verify(3, nodes, context=length)
        for nodes in (2, BLOCK):
            pair.drafter.dummy_pass(3, nodes, context=length)
        after = held()
        assert {sizes[engine.inputs.index("start")] for engine in engines for _, *sizes in engine._views} == {
            (1,),
            (4,),
        }
    assert all(torch.equal(*pair) for pair in zip(before[0], after[0], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(before[1], after[1], strict=True))


def test_plans_count_the_rows_of_a_bundle(
    bundles: tuple[Bundle, Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter's, of which no head has more columns in this engine than numbers."""
    monkeypatch.setattr(memory, "PREFILL_CHUNK", CHUNK)
    folder = bundles[1].path.parent
    pair = take_inventory(read_target_config(folder / "target"), read_drafter_config(folder / "drafter"))
    sizes = {"max_seq_len": MOST, "max_batch_size": SLOTS, "block_size": BLOCK}
    asked = Settings(engine="tensorrt", gpu=find_gpu("h100"), precision=FLOAT32, **sizes)
    held = sum(kind.rows * kind.row_bytes for kind in bundles[1].cache_kinds("drafter"))
    assert memory.estimate_memory(pair, asked).drafter_bytes == SLOTS * held
