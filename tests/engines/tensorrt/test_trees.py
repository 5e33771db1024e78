"""Trees on the engine that runs plans, over a stand-in for TensorRT. Tokens must equal those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from dflash_plugins.launch import by_triton

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.errors import RequestError
from tests.doubles.checkpoints import make_drafter, make_target
from tests.engines.tensorrt.test_runtime import BLOCK, FLOAT32, here, params, prompts  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, here: Any) -> tuple[Bundle, Bundle]:  # noqa: F811
    """A pair with two candidates for each place, and a window that ends within a tree; for both engines."""
    directory = tmp_path_factory.mktemp("wide")
    layers = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 9}
    target = make_target(directory / "target", favourites=6, layers=2, **layers)
    drafter = make_drafter(directory / "drafter", target, taps=(0, 1), block_size=BLOCK)
    settings: dict[str, Any] = {"max_seq_len": 100, "tree_width": 2}
    plain = build(str(target), str(drafter), directory / "onnxruntime", **settings)
    settings |= {"engine": "tensorrt", "precision": FLOAT32}
    options = TensorRTOptions(max_batch_size=3, prefill_chunk=16)
    return plain, build(str(target), str(drafter), directory / "tensorrt", options=options, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kernel", [False, True], ids=["copies", "kernel"])
def test_trees_give_the_tokens_of_onnxruntime(
    wide: tuple[Bundle, Bundle], temperature: float, kernel: bool
) -> None:
    """Five requests in three slots, with penalties. Rows move by copies, or by the kernel in the interpreter."""
    asked = [replace(p, presence_penalty=0.4 * (i % 2)) for i, p in enumerate(params(temperature))]
    moved = list[Sequence[int]]()
    with LLM(wide[0].path, threads=1) as reference:
        expected = [c.token_ids for c in reference.generate(prompts(), asked, speculate=False)]
    with LLM(wide[1].path, max_batch_size=3) as llm:
        pair: Any = llm._runtime.pair
        for each in pair.target.rows.kinds if kernel else ():
            each.pool.compact_by(by_triton, BLOCK)
        compact = pair.target.caches.compact
        pair.target.caches.compact = lambda slot, start, nodes: (
            moved.append(nodes) or compact(slot, start, nodes)
        )
        for nodes in (BLOCK, 4, 0) if not kernel else (BLOCK,):
            found = llm.generate(prompts(), asked, tree_nodes=nodes)
            assert [c.token_ids for c in found] == expected
            assert (sum(c.statistics.num_trees for c in found) > 0) == (nodes > 0)
        assert moved


def test_trees_are_as_large_as_the_plans_allow(wide: tuple[Bundle, Bundle]) -> None:
    """The host would wait for the candidates, so a tree has to be asked for."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(wide[1].path) as llm:
        assert llm.most_tree_nodes == BLOCK
        with pytest.raises(RequestError, match=rf"tree_nodes is {BLOCK + 1}, expected 2\.\.{BLOCK}, or 0"):
            llm.generate([1, 2], params, tree_nodes=BLOCK + 1)
        assert llm.generate([1, 2], params).statistics.num_trees == 0
