"""Quantize Qwen3-MoE: experts like other layers, exclusions, and the resulting pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.widening import widen
from dflash_trt.errors import BuildError
from dflash_trt.formats import SCHEMES
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.quantization.convert import quantize
from tests.quantization.test_downloaded import moe
from tests.quantization.test_quantize import ERRORS

__all__ = ["moe"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_are_quantized_like_other_layers(
    moe: tuple[Path, Path], tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, found = Checkpoint(moe[0]), Checkpoint(quantize(moe[0], tmp_path / "out", scheme))
    experts = [n.removesuffix(".weight") for n in original.tensors if ".experts." in n]
    assert len(experts) == 3 * 8  # in the second layer; the first has a plain MLP
    for name in experts:
        rows, columns = original[f"{name}.weight"].shape
        stored = stored_linear(found, name, columns, rows)
        assert stored is not None
        w = original.array(f"{name}.weight").astype(np.float32)
        assert np.linalg.norm(widen(found, stored) - w) < ERRORS[scheme] * np.linalg.norm(w)
    assert found["model.layers.1.mlp.gate.weight"].dtype == "BF16"
    answers = []
    for limit in (functions.RESIDENT_EXPERT_BYTES, 0):
        monkeypatch.setattr(functions, "RESIDENT_EXPERT_BYTES", limit)
        bundle = build(str(tmp_path / "out"), str(moe[1]), tmp_path / f"bundle{limit}")
        with LLM(bundle.path) as llm:
            prompt = llm.chat_prompt([{"role": "user", "content": "What is 17 + 25?"}])
            params = SamplingParams(max_tokens=32, ignore_eos=True)
            answers += [llm.generate(prompt, params, speculate=s).token_ids for s in (True, False)]
    assert len(answers[0]) == 32
    assert all(answer == answers[0] for answer in answers)


def test_excluding_experts(moe: tuple[Path, Path], tmp_path: Path) -> None:
    kept = quantize(moe[0], tmp_path / "kept", "nvfp4", exclude=["*.experts.*"])
    downs = quantize(moe[0], tmp_path / "downs", "nvfp4", exclude=["*.experts.*.down_proj"])
    layer = "model.layers.1.mlp.experts.3"
    for path, expected in ((kept, [None, None]), (downs, ["NVFP4", None])):
        found = Checkpoint(path).quantization
        named = [found.algorithm(f"{layer}.{name}_proj") for name in ("up", "down")]
        assert [a and a.name for a in named] == expected
        assert found.algorithm("model.layers.1.self_attn.q_proj") is not None
        assert len(found.layers) + len(found.rules) < 8
        build(str(path), str(moe[1]), tmp_path / f"{path.name}-bundle")
    with pytest.raises(BuildError, match=r"matches some of model\.layers\.1\.mlp\.experts\.\*\.down_proj"):
        quantize(moe[0], tmp_path / "out", "nvfp4", exclude=[f"{layer}.*"])
