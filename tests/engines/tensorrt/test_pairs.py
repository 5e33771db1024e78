"""Families and kinds of drafters on TensorRT: over the double the tokens are ONNX Runtime's, and TensorRT-RTX builds
the plans. Gemma 4 has heads of 256 and 512 numbers, Muse Glimmer layers without positions and Meta's drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from dflash_plugins.dialect import TensorRTPlugins

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.checkpoint.tensors import Outline
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.plans import Plans
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.hybrid_checkpoints import make_hybrid, own
from tests.doubles.kind_checkpoints import make_dflash2, make_dspark, make_eagle3
from tests.doubles.text_checkpoints import EXPERTS, GEMMA_IMAGES, make_assistant, make_gemma, make_muse
from tests.doubles.two_engines import for_both, params, prompts
from tests.engines.tensorrt.test_runtime import here

__all__ = ["here"]

Make = Callable[..., Path]
GEMMA = EXPERTS | {
    "architecture": GEMMA_IMAGES, "head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 2, "sliding_window": 20,
    "tie_word_embeddings": False,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 128,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
MUSE = {"head_dim": 128, "num_attention_heads": 2}
MUSE_TARGET = MUSE | {"num_hidden_layers": 3, "num_key_value_heads": 1, "output_multiplier": 0.3}
# By name: the makers of target and drafter, and the compute capability that plans are built for.
PAIRS: dict[str, tuple[Make, Make, int]] = {
    "gemma 4": (
        partial(make_gemma, favourites=8, **GEMMA), partial(make_drafter, layers=1, taps=(0, 1), softcap=5.0), 89,
    ),
    "muse glimmer": (
        partial(make_muse, favourites=8, **MUSE_TARGET),
        partial(make_assistant, num_hidden_layers=1, target_layer_ids=[0, 1], **MUSE), 89,
    ),
    "eagle3": (make_target, partial(make_eagle3, layout="layers.0", aux=(1, 2, 3)), 120),
    "mtp": (partial(make_hybrid, prediction=True, favourites=6, **HYBRID), own, 89),
    "dflash2": (make_target, make_dflash2, 89),
    "dspark": (make_target, partial(make_dspark, head="gated", confidence=True), 120),
}  # fmt: skip


@pytest.fixture(scope="module", params=PAIRS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, str], str]:
    directory, (target, drafter, _) = tmp_path_factory.mktemp("pair"), PAIRS[request.param]
    made = target(directory / "target", **({"favourites": 6} if target is make_target else {}))
    return (str(made), str(drafter(directory / "drafter", made))), request.param


def test_the_tokens_are_those_of_onnxruntime(
    pair: tuple[tuple[str, str], str], tmp_path: Path, here: Any
) -> None:
    """Three requests in two slots, with blocks of several lengths. The drafts are the same, too."""
    options = TensorRTOptions(max_batch_size=2, prefill_chunk=16)
    plain, plans = for_both(tmp_path, *pair[0], "tensorrt", options, max_seq_len=100)
    with LLM(plain.path, threads=1) as reference:
        expected = reference.generate(prompts()[:3], params(0.8)[:3], block_length=reference.block_size)
    with LLM(plans.path) as llm:
        llm.runtime.pair.arrays.samples = False  # Triton's interpreter is slow
        for block_length in (3, llm.block_size):
            found = llm.generate(prompts()[:3], params(0.8)[:3], block_length=block_length)
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    accepted = [c.statistics.num_accepted_tokens for c in found]
    assert accepted == [c.statistics.num_accepted_tokens for c in expected]


def test_plans_in_bfloat16(
    pair: tuple[tuple[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the drafter alone beside a target that others have. Gemma has no fused kernel for heads of 512: a log would
    say so.
    """
    (target, _, capability), whole = PAIRS[pair[1]], Plans.build

    def of_drafter(self: Plans, work: Path, models: Mapping[str, ir.Model], *others: Any) -> Any:
        return whole(self, work, {"drafter": models["drafter"]}, *others)

    if target is make_target:
        monkeypatch.setattr(Plans, "build", of_drafter)
    options = TensorRTOptions(capabilities=(capability,), max_batch_size=2, prefill_chunk=16)
    bundle = build(*pair[0], tmp_path / "bundle", engine="tensorrt-rtx", max_seq_len=64, options=options)
    assert bundle.manifest["precision"] == {"target": "bfloat16", "drafter": "bfloat16"}
    roles = ("drafter",) if target is make_target else ("target", "drafter")
    assert {f"plans/sm{capability}/{role}.plan" for role in roles} <= set(bundle.manifest["files"])


def test_plugins_have_a_body_for_each_kind_of_heads(tmp_path: Path) -> None:
    """With their group, alike parts under a window, and queries scaled so that the kernel's own scale leaves 1."""
    config = read_target_config(PAIRS["gemma 4"][0](tmp_path / "target"))
    dialect = TensorRTPlugins(ir.DataType.BFLOAT16)
    model = build_target(config, Outline(config.path.parent), (0,), dialect, folder="t", capacity=64)
    found = {}
    for function in model.functions.values():
        for node in function:
            if node.op_type.startswith("Attend"):
                scales = [n for n in function if n.op_type == "Constant" and "value" in n.attributes]
                most = max(n.attributes["value"].as_tensor().numpy().max() for n in scales)
                windowed = node.attributes["windowed"].as_int()
                found[function.name] = node.attributes["group"].as_int(), windowed, float(most)
    assert found == {
        "WindowedCachedAttention": (2, 1, pytest.approx(16)),
        "CachedAttention1x512": (4, 0, pytest.approx(512**0.5)),
    }
