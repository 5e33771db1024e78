"""The bodies for TensorRT, executed on ONNX Runtime. The `trt::` operators do what their documentation says.

Compared with Transformers in float32, by the tests of test_parity.py, and in FP16 with the same in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.graph.builder import FLOAT
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.models.drafters import build_drafter
from dflash_trt.models.drafters.kind import DrafterParts
from dflash_trt.models.target import build_target
from dflash_trt.quantization.convert import quantize
from tests.doubles.checkpoints import VOCAB, make_drafter, make_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter, make_llama, make_qwen3_moe
from tests.doubles.reference import Drafter, target_outputs
from tests.doubles.sessions import HeadMajorEngine
from tests.doubles.trt_bodies import executable
from tests.models.test_families import load
from tests.models.test_parity import (  # noqa: F401  # the tests among them run on this module's `case`
    fill,
    ints,
    test_sequences_of_a_batch_do_not_meet,
    test_target,
    test_target_verifies_a_block_and_rolls_back,
)

CAPACITY = 160
CONFIGS: Any = ((read_target_config, "target"), (read_drafter_config, "drafter"))
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, Any] = {
    "qwen3": (make_target, make_drafter, {"layer_types": (SLIDING, FULL), "sliding_window": 10}),
    "llama": (make_llama, make_drafter, {}),
    "qwen3-moe": (make_qwen3_moe, make_drafter, {"is_causal": True}),
    "gpt-oss": (partial(make_gpt_oss, quantized=False), make_gpt_oss_drafter, {"layers": 2}),
}


def fused(dtype: ir.DataType = FLOAT) -> TensorRT:
    """The body with `trt::` operators, also in the dtype for which TensorRT has no kernel."""
    dialect = TensorRT(dtype)
    dialect.fused = True
    return dialect


def standard(dtype: ir.DataType = FLOAT) -> TensorRT:
    return TensorRT(dtype, trt_operators=False)


@dataclass
class Case:
    """Both graphs of a pair, executed by ONNX Runtime. Replaces the Case of test_parity.py."""

    directory: Path
    dialect: TensorRT

    def __post_init__(self) -> None:
        self.drafter, self.vocab = Drafter(self.directory / "drafter"), VOCAB
        self.target = load(self.directory / "target")
        for role, model in export(self.directory, self.dialect).items():
            ir.save(model, self.directory / f"{role}.onnx")
            onnx.save(executable(onnx.load(self.directory / f"{role}.onnx")), self.path(f"{role}.onnx"))

    def path(self, graph: str) -> Path:
        return self.directory / f"executable-{graph}"

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self.vocab, count).tolist()

    def engine(self, graph: str, slots: int = 1) -> HeadMajorEngine:
        engine = HeadMajorEngine(self.path(graph), slots=slots)
        fill(engine.caches)
        return engine


def export(directory: Path, dialect: TensorRT) -> dict[str, ir.Model]:
    target, drafter = directory / "target", directory / "drafter"
    configs = read_target_config(target), read_drafter_config(drafter)
    return {
        "target": build_target(
            configs[0],
            Checkpoint(target),
            configs[1].target_layer_ids,
            dialect,
            folder="target",
            capacity=CAPACITY,
        ),
        "drafter": build_drafter(
            DrafterParts(
                *(configs[1], Checkpoint(drafter), configs[0], Checkpoint(target), dialect),
                folder="drafter",
                target_folder="target",
                capacity=CAPACITY,
            )
        ),
    }


def make_pair(directory: Path, family: str) -> Path:
    make, make_its_drafter, settings = FAMILIES[family]
    target = make(directory / "target")
    make_its_drafter(directory / "drafter", target, **settings)
    return directory


@pytest.fixture(
    scope="module",
    params=[(f, d) for f in FAMILIES for d in (fused, standard) if d is fused or f in ("qwen3", "gpt-oss")],
    ids=lambda c: f"{c[0]}, {c[1].__name__}",
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, dialect = request.param
    return Case(make_pair(tmp_path_factory.mktemp("numbers"), family), dialect())


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4", "mxfp4"])
def test_quantized_layers_that_lie_together_are_one_product(tmp_path: Path, scheme: str) -> None:
    make_pair(tmp_path / "plain", "qwen3")
    for role in ("target", "drafter"):
        quantize(tmp_path / "plain" / role, tmp_path / role, scheme)
    outputs, products = [], []
    for joins in (True, False):
        dialect = fused()
        dialect.joins_quantized = joins
        for role, model in export(tmp_path, dialect).items():
            ir.save(model, tmp_path / f"{role}.onnx")
            products.append(sum(node.op_type == "Gemm" for node in model.graph))
        onnx.save(executable(onnx.load(tmp_path / "target.onnx")), tmp_path / "executable.onnx")
        engine = HeadMajorEngine(tmp_path / "executable.onnx", slots=1)
        tokens = np.random.default_rng(0).integers(0, VOCAB, 20)
        outputs.append(engine.run({"tokens": ints(tokens), "start": ints(0), "rows": ints(range(20))}))
    np.testing.assert_allclose(outputs[0]["logits"], outputs[1]["logits"], atol=1e-4)
    np.testing.assert_allclose(outputs[0]["features"], outputs[1]["features"], atol=1e-4)
    layers = [read(tmp_path / role).num_hidden_layers for read, role in CONFIGS]
    # Queries, keys and values become one product; so do gate and up. The drafter's queries have another input.
    assert [apart - one for one, apart in zip(products[:2], products[2:], strict=True)] == [
        3 * layers[0],
        2 * layers[1],
    ]


@pytest.mark.parametrize("largest", [None, 6e4])
def test_fp16_keeps_up_with_features_beyond_its_sums(tmp_path: Path, largest: float | None) -> None:
    """Tapped states as large as FP16 allows: the sums of fc would exceed 65504 without the scale."""
    directory = make_pair(tmp_path, "qwen3")
    case = Case(directory, fused(ir.DataType.FLOAT16))
    features = target_outputs(case.target, case.tokens(12), case.drafter.taps)[1]
    if largest is not None:
        features = (features * (3 * largest / features.abs().max())).clamp(-largest, largest)
    weight = Checkpoint(directory / "drafter").array("fc.weight").astype(np.float32)
    assert (np.abs(features.numpy() @ weight.T).max() > 65504) == (largest is not None)
    expected = case.drafter.propose(case.target, features, 7)
    block = [7] + [case.drafter.mask_token_id] * (case.drafter.block_size - 1)
    feeds = {"features": features.numpy().astype(np.float16)[None], "n_features": ints(len(features))}
    out = case.engine("drafter.onnx").run({**feeds, "start": ints(0), "block": ints(block)})
    assert np.isfinite(out["draft_logprobs"]).all()
    np.testing.assert_allclose(out["draft_logprobs"][0, :, 0], expected.logprobs.numpy(), atol=0.15)
    assert np.mean(out["draft_tokens"][0, :, 0] == expected.tokens) > 0.7


@pytest.mark.parametrize("family", FAMILIES)
def test_fp16_target_is_close_to_float32(tmp_path: Path, family: str) -> None:
    """The dtype of every part. A graph with a missing cast would not load."""
    case = Case(make_pair(tmp_path, family), fused(ir.DataType.FLOAT16))
    tokens = case.tokens(20)
    logits, _ = target_outputs(case.target, tokens, case.drafter.taps)
    out = case.engine("target.onnx").run({"tokens": ints(tokens), "start": ints(0), "rows": ints(range(20))})
    assert out["features"].dtype == np.float16
    assert out["logits"].dtype == np.float32
    gaps = np.abs(out["logits"][0] - logits.numpy()).max(axis=1)
    assert np.median(gaps) < 0.05
    assert np.mean(gaps < 0.1) >= 0.9  # if two experts are nearly equal, rounding may choose the other one
