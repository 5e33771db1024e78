"""Gemma 4 and Muse Glimmer on TensorRT: over the double the tokens are ONNX Runtime's, and TensorRT-RTX builds them.

Gemma 4 has heads of 256 and 512 numbers, Muse Glimmer layers without positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from dflash_plugins.dialect import TensorRTPlugins

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.checkpoint.tensors import Outline
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from tests.doubles.checkpoints import make_drafter
from tests.doubles.muse_checkpoints import make_assistant, make_muse
from tests.doubles.text_checkpoints import EXPERTS, GEMMA_IMAGES, make_gemma
from tests.engines.tensorrt.test_runtime import FLOAT32, here, params, prompts

__all__ = ["here"]

WIDE = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 2, "sliding_window": 20}


def make_gemma_pair(folder: Path) -> tuple[Path, Path]:
    target = make_gemma(
        folder / "target", GEMMA_IMAGES, favourites=8, **EXPERTS, **WIDE, tie_word_embeddings=False
    )
    return target, make_drafter(folder / "drafter", target, layers=1, taps=(0, 1), softcap=5.0)


def make_muse_pair(folder: Path) -> tuple[Path, Path]:
    """With Meta's drafter. Heads have the published size."""
    sizes = {"head_dim": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = make_muse(folder / "target", favourites=8, output_multiplier=0.3, **sizes)
    small = {"num_hidden_layers": 1, "head_dim": 128, "num_attention_heads": 2, "target_layer_ids": [0, 1]}
    return target, make_assistant(folder / "drafter", **small)


@pytest.fixture(scope="module", params=[make_gemma_pair, make_muse_pair])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    target, drafter = request.param(tmp_path_factory.mktemp("pair"))
    return str(target), str(drafter)


def test_the_tokens_are_those_of_onnxruntime(pair: tuple[str, str], tmp_path: Path, here: Any) -> None:
    options = TensorRTOptions(max_batch_size=2, prefill_chunk=16)
    plain = build(*pair, tmp_path / "onnxruntime", max_seq_len=100)
    plans = build(
        *pair,
        tmp_path / "tensorrt",
        max_seq_len=100,
        engine="tensorrt",
        precision=FLOAT32,
        options=options,
    )
    with LLM(plain.path, threads=1) as reference:
        expected = reference.generate(prompts()[:3], params(0.8)[:3], block_length=reference.block_size)
    with LLM(plans.path) as llm:
        llm._runtime.pair.arrays.samples = False  # Triton's interpreter is slow
        found = llm.generate(prompts()[:3], params(0.8)[:3], block_length=llm.block_size)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    accepted = [c.statistics.num_accepted_tokens for c in found]
    assert accepted == [c.statistics.num_accepted_tokens for c in expected]


def test_plans_in_bfloat16(pair: tuple[str, str], tmp_path: Path) -> None:
    """Gemma has no fused kernel for heads of 512. The log of the build would say so."""
    options = TensorRTOptions(capabilities=(89,), max_batch_size=2, prefill_chunk=16)
    bundle = build(*pair, tmp_path / "bundle", engine="tensorrt-rtx", max_seq_len=64, options=options)
    assert "plans/sm89/target.plan" in bundle.manifest["files"]


def test_plugins_have_a_body_for_each_kind_of_heads(tmp_path: Path) -> None:
    """With the group of its heads, and queries scaled so that the kernel's own scale leaves 1."""
    config = read_target_config(make_gemma_pair(tmp_path)[0])
    dialect = TensorRTPlugins(ir.DataType.BFLOAT16)
    model = build_target(config, Outline(config.path.parent), (0,), dialect, folder="t", capacity=64)
    found = {}
    for function in model.functions.values():
        for node in function:
            if node.op_type.startswith("Attend"):
                scales = [n for n in function if n.op_type == "Constant" and "value" in n.attributes]
                values = [n.attributes["value"].as_tensor().numpy() for n in scales]
                found[function.name] = (
                    node.attributes["group"].as_int(),
                    float(max(v.max() for v in values)),
                )
    assert found == {
        "CachedAttention": (2, pytest.approx(16)),
        "CachedAttention1x512": (4, pytest.approx(512**0.5)),
    }
