"""Checkpoints in FP8 by blocks: Transformers' meaning of them, builds from them, and wrong ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import digest
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import CheckpointError
from dflash_trt.formats.precision import Precision
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.repack import in_bf16
from dflash_trt.trtllm.options import TensorRTLLMOptions
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.formats import in_fp8_blocks, split


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("blocks")
    make_drafter(root / "drafter", make_target(root / "plain"), layers=1)
    in_fp8_blocks(root / "plain", root / "target", size=16)
    return root, load_file(root / "plain" / "model.safetensors")


@pytest.mark.parametrize("shards", [1, 2])
def test_widened_weights_are_those_of_transformers(
    pair: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, shards: int
) -> None:
    root, original = pair
    stored = load_file(root / "target" / "model.safetensors")
    shutil.copytree(root / "target", tmp_path / "target")
    if shards > 1:
        split(tmp_path / "target", shards)
    out = tmp_path / "bf16"
    assert len(in_bf16(Checkpoint(tmp_path / "target"), out, silent).files) == shards
    made = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert made.keys() == original.keys()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    read: Any = Fp8Dequantize(None)
    for name, tensor in made.items():
        if name.endswith("proj.weight"):
            scales = stored[f"{name}_scale_inv"]
            assert torch.equal(tensor, read._dequantize_one(stored[name], scales, torch.bfloat16)), name
            assert torch.allclose(tensor.float(), original[name].float(), rtol=0.07, atol=1e-3), name
        else:
            assert torch.equal(tensor, original[name]), name


def test_blocks_of_model_optimizer_are_widened_without_scales_of_the_cache(tmp_path: Path) -> None:
    said = {"quantization": {"quant_algo": "fp8_pb_wo", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    codes, scale = torch.ones(256, 128).to(torch.float8_e4m3fn), torch.tensor([0.5, 2.0]).reshape(2, 1, 1, 1)
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.k_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    out = in_bf16(Checkpoint(tmp_path), tmp_path / "bf16", silent).directory
    found = load_file(out / "model.safetensors")
    assert found.keys() == {"a.weight"}
    assert found["a.weight"][:, 0].tolist() == [0.5] * 128 + [2.0] * 128


def test_the_last_blocks_may_be_smaller(tmp_path: Path) -> None:
    tmp_path.joinpath("config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 3]}})
    )
    codes = torch.arange(1, 71).reshape(10, 7).to(torch.float8_e4m3fn)
    scales = torch.arange(1, 10).reshape(3, 3).to(torch.bfloat16)
    save_file({"a.weight": codes, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    out = in_bf16(Checkpoint(tmp_path), tmp_path / "bf16", silent).directory
    found = load_file(out / "model.safetensors")["a.weight"].float()
    for row, column in np.ndindex(10, 7):
        assert found[row, column] == codes[row, column].float() * (1 + 3 * (row // 4) + column // 3)


def test_a_build_for_the_cpu_widens_the_blocks(pair: tuple[Path, Any], tmp_path: Path) -> None:
    """All other engines have the checkpoint's bytes."""
    root, _ = pair
    sources = str(root / "target"), str(root / "drafter")
    bundle, kept = build(*sources, tmp_path / "a"), build(*sources, tmp_path / "b", engine="torch")
    name = "weights/target/model.safetensors"
    assert kept.manifest["files"][name]["sha256"] == digest(root / "target" / "model.safetensors")
    widened = in_bf16(Checkpoint(root / "target"), tmp_path / "bf16", silent).directory
    assert bundle.manifest["files"][name]["sha256"] == digest(widened / "model.safetensors")
    with LLM(bundle.path) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        answers = [llm.generate([3, 5, 7, 11], params, speculate=s).token_ids for s in (True, False)]
    assert answers[0] == answers[1]
    assert build(*sources, tmp_path / "c", weights="none").manifest["target"]["parameters"] > 0
    with pytest.raises(CheckpointError, match="already FP8 in blocks"):
        quantize(root / "target", tmp_path / "q", "int4")
    again = build(*sources, tmp_path / "e", precision=Precision(target="int8"))
    assert "U8" in again.manifest["target"]["weight_bytes"]["mlp"]
    with pytest.raises(
        CheckpointError, match=r"weight_block_size is \[16, 16\], TensorRT-LLM reads \[128, 128\]"
    ):
        build(*sources, tmp_path / "d", engine="tensorrt-llm", options=TensorRTLLMOptions(gpu="h200"))
