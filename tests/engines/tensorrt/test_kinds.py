"""Kinds of drafters on TensorRT: over the double the tokens are ONNX Runtime's, and TensorRT-RTX builds the plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.plans import Plans
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
CAPABILITIES = {"eagle3": 120, "dflash2": 89, "dspark": 120}


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
        for block_length in (llm.block_size, 3):
            found = llm.generate(prompts()[:3], params(0.8)[:3], block_length=block_length)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            if block_length == llm.block_size:  # the drafts are the same too
                accepted = [c.statistics.num_accepted_tokens for c in found]
                assert accepted == [c.statistics.num_accepted_tokens for c in expected]


def test_plans_in_bfloat16(
    pair: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the drafter alone, each kind for one GPU: the target's plan is the same beside every kind."""
    whole = Plans.build

    def of_drafter(self: Plans, work: Path, models: Mapping[str, ir.Model], *others: Any) -> Any:
        return whole(self, work, {"drafter": models["drafter"]}, *others)

    monkeypatch.setattr(Plans, "build", of_drafter)
    capability = CAPABILITIES[request.node.callspec.params["pair"]]
    options = TensorRTOptions(capabilities=(capability,), max_batch_size=2, prefill_chunk=16)
    bundle = build(*pair, tmp_path / "bundle", engine="tensorrt-rtx", max_seq_len=64, options=options)
    assert bundle.manifest["precision"] == {"target": "bfloat16", "drafter": "bfloat16"}
    assert f"plans/sm{capability}/drafter.plan" in bundle.manifest["files"]
