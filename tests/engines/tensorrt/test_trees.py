"""Draft trees on plans, over the stand-in for TensorRT: the tokens are those of ONNX Runtime without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.decoding.statistics import Statistics
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from tests.doubles.checkpoints import make_drafter, make_target
from tests.engines.tensorrt.test_runtime import BLOCK, FLOAT32, here, params, prompts  # noqa: F401  # a fixture


def test_trees_on_a_device(tmp_path: Path, here: Any) -> None:  # noqa: F811
    target = make_target(tmp_path / "target", favourites=6)
    drafter = make_drafter(tmp_path / "drafter", target, block_size=BLOCK)
    settings: dict[str, Any] = {"max_seq_len": 100, "tree_width": 3}
    plain = build(str(target), str(drafter), tmp_path / "onnxruntime", **settings)
    options = TensorRTOptions(max_batch_size=3, prefill_chunk=16)
    on_device = build(
        str(target),
        str(drafter),
        tmp_path / "tensorrt",
        engine="tensorrt",
        precision=FLOAT32,
        options=options,
        **settings,
    )
    for temperature in (0.0, 0.8):
        with LLM(plain.path, threads=1) as reference:
            expected = reference.generate(prompts(), params(temperature), speculate=False)
        with LLM(on_device.path) as llm:
            for nodes in (BLOCK, None):
                found = llm.generate(prompts(), params(temperature), tree_nodes=nodes)
                assert [c.token_ids for c in found] == [c.token_ids for c in expected]
                trees = Statistics.merge(c.statistics for c in found).num_trees
                assert (trees > 0) == (nodes is not None)  # the host would have to wait for the candidates
