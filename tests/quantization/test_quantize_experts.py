"""Quantize Qwen3-MoE: experts like other layers, exclusions, calibrated scales, and the resulting pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.widening import widen
from dflash_trt.errors import BuildError
from dflash_trt.formats import SCHEMES
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.quantization.calibrate import activation_amax, calibration_set
from dflash_trt.quantization.convert import quantize
from tests.models.test_families import load
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


def test_experts_share_their_calibrated_scales(moe: tuple[Path, Path], tmp_path: Path) -> None:
    """Some experts may get no token. The inputs of down projections are observed after the activation."""
    prompts = [ids[:2] for ids in calibration_set(moe[0], None)[:1]]
    amax = activation_amax(moe[0], None, prompts, work=tmp_path)
    found = Checkpoint(quantize(moe[0], tmp_path / "out", "fp8", calibration=amax))
    layer = "model.layers.1.mlp.experts"
    scales = {
        name: {found.array(f"{layer}.{e}.{name}_proj.input_scale").item() for e in range(8)}
        for name in ("gate", "up", "down")
    }
    assert [len(values) for values in scales.values()] == [1, 1, 1]
    assert scales["gate"] == scales["up"]
    assert scales["gate"].pop() == pytest.approx(amax["model.layers.1.mlp.gate"] / 448)
    assert scales["down"].pop() == pytest.approx(_largest_hidden(moe[0], prompts[0]) / 448, rel=1e-4)


def _largest_hidden(target: Path, prompt: list[int]) -> float:
    """The largest value between SwiGLU and the down projections of layer 1, in the chosen experts, by Transformers."""
    model, tokens, seen = load(target), list(prompt), list[tuple[Any, ...]]()
    model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    weights = model.model.layers[1].mlp.experts.gate_up_proj
    with torch.no_grad():
        for _ in range(32):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        seen.clear()
        model(torch.tensor([tokens]))
        ((hidden, chosen, *_),) = seen
        gate, up = torch.einsum("rd,rkid->rki", hidden, weights[chosen]).chunk(2, dim=-1)
        return float((torch.nn.functional.silu(gate) * up).abs().max())
