"""Kinds of drafters on TensorRT: over the double the tokens are ONNX Runtime's, and TensorRT-RTX builds the plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from tests.doubles.checkpoints import make_target
from tests.doubles.kind_checkpoints import make_dflash2, make_dspark, make_eagle3
from tests.engines.tensorrt.test_runtime import FLOAT32, here, params, prompts

__all__ = ["here"]

Make = Callable[[Path, Path], Path]
KINDS: dict[str, Make] = {
    "eagle3": lambda out, target: make_eagle3(out, target, layout="layers.0", aux=(1, 2, 3)),
    "dflash2": make_dflash2,
    "dspark": lambda out, target: make_dspark(out, target, head="rnn", confidence=True),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    directory = tmp_path_factory.mktemp("kinds")
    target = make_target(directory / "target", layers=4, favourites=6)
    return str(target), str(KINDS[request.param](directory / "drafter", target))


def test_the_tokens_are_those_of_onnxruntime(pair: tuple[str, str], tmp_path: Path, here: Any) -> None:
    """Three requests in two slots, with blocks of several lengths."""
    options = TensorRTOptions(max_batch_size=2, prefill_chunk=16)
    settings: dict[str, Any] = {"engine": "tensorrt", "precision": FLOAT32, "options": options}
    plain = build(*pair, tmp_path / "onnxruntime", max_seq_len=100)
    plans = build(*pair, tmp_path / "tensorrt", max_seq_len=100, **settings)
    with LLM(plain.path, threads=1) as reference:
        expected = reference.generate(prompts()[:3], params(0.8)[:3], block_length=reference.block_size)
    with LLM(plans.path) as llm:
        llm._runtime.pair.arrays.samples = False  # Triton's interpreter is slow
        for block_length in (llm.block_size, 3):
            found = llm.generate(prompts()[:3], params(0.8)[:3], block_length=block_length)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            if block_length == llm.block_size:  # the drafts are the same too
                accepted = [c.statistics.num_accepted_tokens for c in found]
                assert accepted == [c.statistics.num_accepted_tokens for c in expected]


def test_plans_in_bfloat16(pair: tuple[str, str], tmp_path: Path) -> None:
    options = TensorRTOptions(capabilities=(120, 89), max_batch_size=2, prefill_chunk=16)
    bundle = build(*pair, tmp_path / "bundle", engine="tensorrt-rtx", max_seq_len=64, options=options)
    assert bundle.manifest["precision"] == {"target": "bfloat16", "drafter": "bfloat16"}
    for capability in (120, 89):
        assert f"plans/sm{capability}/drafter.plan" in bundle.manifest["files"]
