"""The body of `dflash::MoE` on ONNX Runtime, compared with plain NumPy: results, constants folded at load, bytes per
pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import onnxruntime_moe
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.models.configs import read_target_config
from dflash_trt.models.target import build_target
from tests.doubles.family_checkpoints import make_gpt_oss, make_qwen3_moe
from tests.doubles.sessions import executed, session

Array = np.ndarray[Any, Any]

HIDDEN, INNER, EXPERTS = 64, 96, 8
UNLIMITED = float(np.finfo(np.float32).max)
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
SILU = {"alpha": 1.0, "beta": 0.0, "limit": UNLIMITED}
STORAGES = {
    "mxfp4": np.uint8, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
LOAD = pytest.mark.parametrize("resident", [True, False], ids=["resident", "in use"])


@dataclass
class Layer:
    """Random experts of one storage kind, their values in float64, and the operator's graph."""

    storage: str
    biased: bool = True
    seed: int = 0
    tensors: dict[str, Array | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for name, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
            shape, scales, gain = (EXPERTS, rows, columns), None, 3.0 if name == "gate_up" else 1.0
            if self.storage == "mxfp4":
                weight = rng.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
                scales = rng.integers(120, 125, weight.shape[:-1], np.uint8)
            else:
                weight = (gain * columns**-0.5 * rng.normal(size=shape)).astype(STORAGES[self.storage])
            bias = rng.normal(size=shape[:-1]).astype(np.float32) if self.biased else None
            self.tensors |= {name: weight, f"{name}_scales": scales, f"{name}_bias": bias}

    @cached_property
    def matrices(self) -> dict[str, Array]:
        return {
            name: _widened(self.tensors[name], self.tensors[f"{name}_scales"]) for name in ("gate_up", "down")
        }

    def model(self, *, resident: bool, k: int, settings: Mapping[str, float]) -> ir.Model:
        g = GraphBuilder("layer")
        x, router = g.input("x", FLOAT, ["rows", HIDDEN]), g.input("router", FLOAT, ["rows", EXPERTS])
        weights = [g.constant(t, t.dtype.type) for t in self.tensors.values() if t is not None]
        body = onnxruntime_moe(
            "mxfp4" if self.storage == "mxfp4" else "float",
            weights[0].dtype,
            biased=self.biased,
            resident=resident,
        )
        (y,) = g.call(body, x, router, *weights, name="experts", k=k, **settings)
        g.output(y, "y", FLOAT, ["rows", HIDDEN])
        return g.model()

    def session(
        self, *, resident: bool, k: int = 3, settings: Mapping[str, float] = GPT_OSS, **options: Any
    ) -> ort.InferenceSession:
        return session(self.model(resident=resident, k=k, settings=settings), **options)

    def reference(self, x: Array, router: Array, k: int, settings: Mapping[str, float] = GPT_OSS) -> Array:
        """Row by row, expert by expert, in float64. Needs router logits without ties."""
        y = np.zeros((len(x), HIDDEN))
        for row, (values, logits) in enumerate(
            zip(x.astype(np.float64), router.astype(np.float64), strict=True)
        ):
            chosen = np.argsort(-logits)[:k]
            shares = np.exp(logits[chosen] - logits[chosen].max())
            for e, share in zip(chosen, shares / shares.sum(), strict=True):
                h = self.matrices["gate_up"][e] @ values
                if self.biased:
                    h = h + self.tensors["gate_up_bias"][e]
                gate = np.minimum(h[0::2], settings["limit"])
                up = np.clip(h[1::2], -settings["limit"], settings["limit"])
                gate = gate * np.exp(-np.logaddexp(0, -settings["alpha"] * gate))
                out = self.matrices["down"][e] @ ((up + settings["beta"]) * gate)
                y[row] += share * (out + self.tensors["down_bias"][e] if self.biased else out)
        return y


def _widened(weight: Array, scales: Array | None) -> Array:
    """Values in float64 by the definition of the formats. `ml_dtypes` decodes them, without our tables."""
    if scales is None:
        return weight.astype(np.float64)
    halves = np.stack([weight & 15, weight >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return (halves.reshape(*weight.shape[:-1], 32) * factors[..., None]).reshape(*weight.shape[:2], -1)


def routes(rows: int, distinct: int, k: int, rng: np.random.Generator) -> Array:
    """Router logits with which `rows` rows choose exactly `distinct` experts, k each. No two logits are equal."""
    assert k <= distinct <= rows * k
    logits = np.sort(rng.normal(size=(rows, EXPERTS)), axis=1).astype(np.float32)
    pool = rng.permutation(EXPERTS)[:distinct]
    for row in range(rows):
        best = pool[(np.arange(k) + row * k) % distinct]
        order = np.concatenate([np.setdiff1d(np.arange(EXPERTS), best), best])
        logits[row, order] = logits[row].copy()
    return logits


def assert_close(actual: Array, expected: Array) -> None:
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * max(1, np.abs(expected).max()))


@LOAD
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "plain"])
@pytest.mark.parametrize("storage", STORAGES)
def test_against_numpy(storage: str, biased: bool, resident: bool) -> None:
    layer, rng = Layer(storage, biased), np.random.default_rng(1)
    for k, settings in (
        (1, GPT_OSS),
        (4, GPT_OSS),
        (EXPERTS, SILU),
        (2, SILU),
        (3, {"alpha": 0.7, "beta": 0.25, "limit": 0.5}),
    ):
        run = layer.session(resident=resident, k=k, settings=settings)
        for rows in (1, 5, 33):
            x = rng.normal(0, 2, (rows, HIDDEN)).astype(np.float32)
            router = rng.normal(0, 3, (rows, EXPERTS)).astype(np.float32)
            if rows == 5:  # logits far apart, large, and one that leaves nothing to the others
                router[1] *= 1e4
                router[2] += 1e4
                router[3, 5] = 1e30
            (y,) = run.run(None, {"x": x, "router": router})
            assert_close(y, layer.reference(x, router, k, settings))


@pytest.mark.parametrize("storage", ["mxfp4", "bfloat16"])
def test_a_pass_reads_the_experts_that_some_row_chose(storage: str, tmp_path: Path) -> None:
    """For every number of distinct experts: the same result in both modes, and bytes in proportion."""
    layer, k, rng = Layer(storage), 2, np.random.default_rng(2)
    per_expert = sum(t[0].nbytes for t in layer.tensors.values() if t is not None)
    whole = layer.session(resident=True, k=k)
    for distinct in range(k, EXPERTS + 1):
        rows = max(1, -(-distinct // k))
        x = rng.normal(0, 2, (rows, HIDDEN)).astype(np.float32)
        feeds = {"x": x, "router": routes(rows, distinct, k, rng)}
        run = layer.session(
            resident=False, k=k, enable_profiling=True, profile_file_prefix=str(tmp_path / "p")
        )
        (y,) = run.run(None, feeds)
        assert_close(y, layer.reference(x, feeds["router"], k))
        np.testing.assert_allclose(whole.run(None, feeds)[0], y, atol=1e-5)
        gathered = {
            event["name"]: int(event["args"]["output_size"])
            for event in executed(run)
            if event["name"].endswith("_active_kernel_time") and "router" not in event["name"]
        }
        assert len(gathered) == sum(t is not None for t in layer.tensors.values())
        assert sum(gathered.values()) == distinct * per_expert


@LOAD
def test_what_a_row_gets_does_not_depend_on_the_others(resident: bool) -> None:
    """Not even if its logits tie: the other rows of the pass must not influence the choice."""
    layer, rng = Layer("mxfp4"), np.random.default_rng(3)
    x = rng.normal(size=(12, HIDDEN)).astype(np.float32)
    router = rng.integers(0, 2, (12, EXPERTS)).astype(np.float32)
    router[0] = 0
    for k in (1, 3):
        run = layer.session(resident=resident, k=k)
        (together,) = run.run(None, {"x": x, "router": router})
        for row in range(len(x)):
            (alone,) = run.run(None, {"x": x[row : row + 1], "router": router[row : row + 1]})
            np.testing.assert_allclose(together[row], alone[0], atol=1e-5)


@LOAD
def test_extreme_scales(resident: bool) -> None:
    """Experts with the smallest and the largest scale, and one with NaN, which spoils only the rows that choose it."""
    layer, k = Layer("mxfp4"), 2
    gate_up, scales = layer.tensors["gate_up"], layer.tensors["gate_up_scales"]
    scales[0], scales[1], scales[2] = 0, 254, 255
    gate_up[1] &= 0x33  # 0 .. 1.5, whose products with 2**127 are finite
    x = np.random.default_rng(5).normal(size=(4, HIDDEN)).astype(np.float32)
    x[1] *= 1e-30
    router = np.zeros((4, EXPERTS), np.float32) - np.arange(EXPERTS, dtype=np.float32)
    for row in range(3):
        router[row, [row, 5]] = 2, 1
    router[3, [6, 7]] = 2, 1
    (y,) = layer.session(resident=resident, k=k).run(None, {"x": x, "router": router})
    assert np.isnan(y[2]).all()
    keep = [0, 1, 3]
    assert_close(y[keep], layer.reference(x[keep], router[keep], k))


MAKERS = {
    "gpt-oss": (make_gpt_oss, {}),
    "gpt-oss, not quantized": (make_gpt_oss, {"quantized": False}),
    "qwen3-moe": (make_qwen3_moe, {"mlp_only_layers": [0]}),
}


@LOAD
@pytest.mark.parametrize("family", MAKERS)
def test_the_target_s_graph_folds(
    family: str, resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer the operator's weights are constants, or come by Gather from the stored constants."""
    make, settings = MAKERS[family]
    directory = make(tmp_path / "target", **settings)
    monkeypatch.setattr(functions, "RESIDENT_EXPERT_BYTES", (1 << 30) if resident else 0)
    config = read_target_config(directory)
    model = build_target(config, Checkpoint(directory), (1, 2), OnnxRuntime(), folder="target")
    ir.save(model, tmp_path / "target.onnx")
    session(tmp_path / "target.onnx", optimized_model_filepath=str(tmp_path / "optimized.onnx"))
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    stored = {i.name: i.data_type for i in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    layers = [node for node in graph.node if node.op_type == "MoE"]
    assert len(layers) == sum(config.moe.sparse_layers)
    assert not any(node.domain == "dflash" for node in graph.node)
    kinds = {onnx.TensorProto.UINT8 if family == "gpt-oss" else onnx.TensorProto.BFLOAT16}
    for node in layers:
        for name in (node.input[2], node.input[4]):
            if resident:
                assert stored[name] == onnx.TensorProto.FLOAT
            else:
                assert {stored[source] for source in gathered(name, producers)} == kinds


def gathered(name: str, producers: Mapping[str, onnx.NodeProto]) -> set[str]:
    """The names of the tensors from which `name` gathers the experts in use."""
    node = producers.get(name)
    if node is None:
        return set()
    if node.op_type == "Gather" and "_active" in node.name:
        return {node.input[0]}
    return {source for each in node.input for source in gathered(each, producers)}
