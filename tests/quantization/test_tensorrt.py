"""Quantized linear layers in TensorRT-RTX without a GPU: builds per GPU, and packed weights in plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_experts, stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.engines.tensorrt.builder import build_plan
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.profiles import Profile
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized_experts import Projection, Stack
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.repack import int4_by_row

SIZE, LAYER = 2048, "layers.0.mlp.up_proj"
BF16_BYTES = 2 * SIZE * SIZE
# Bytes per weight with its scales, then the largest additional size of a plan.
PACKED = {"fp8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.515625}
KERNELS = 800_000
EXPERTS, COUNT, WIDTH = "layers.0.mlp.experts", 8, 768
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
# Each scheme with calibrated and computed scales of the input, in both dtypes, for GPUs of several generations.
packed_in_plans = pytest.mark.parametrize(
    ("scheme", "calibrated", "capability", "dtype"),
    [
        ("fp8", True, 89, "BFLOAT16"),
        ("fp8", False, 120, "FLOAT16"),
        ("nvfp4", True, 120, "BFLOAT16"),
        ("nvfp4", False, 121, "FLOAT16"),
        ("mxfp4", False, 120, "BFLOAT16"),
        ("int4", False, 80, "BFLOAT16"),
        ("int4", False, 120, "FLOAT16"),
    ],
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer in float32."""
    directory = tmp_path_factory.mktemp("source")
    w = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    name = f"{LAYER}.weight"
    (directory / "config.json").write_text("{}")
    write_shard(directory / "model.safetensors", [Entry(name, "F32", w.shape, [(name, w)])])
    return directory


@packed_in_plans
def test_plans_keep_weights_packed(
    tmp_path: Path, source: Path, scheme: str, calibrated: bool, capability: int, dtype: str
) -> None:
    amax = {LAYER: 4.0} if calibrated else None
    folder = quantize(source, tmp_path / "quantized", scheme, calibration=amax)
    if scheme == "int4":
        folder = int4_by_row(Checkpoint(folder), tmp_path / "by-row", silent)
    stored = stored_linear(Checkpoint(folder), LAYER, SIZE, SIZE)
    assert stored is not None
    dialect = TensorRT(ir.DataType[dtype])
    g = GraphBuilder("test", dtype=dialect.dtype)
    x = g.input("x", dialect.dtype, ["R", SIZE])
    for name in ("first", "second"):  # the same weights twice: names must not clash
        x = dialect.quantized_linear(g, x, stored, ".", None, name=name, widened_bytes=0)
    g.output(x, "y", dialect.dtype, ["R", SIZE])
    packed = PACKED[scheme] * SIZE * SIZE
    assert packed <= plan_bytes(g, folder, capability) < packed + KERNELS < BF16_BYTES


def plan_bytes(g: GraphBuilder, folder: Path, capability: int) -> int:
    model = g.model()
    model.graph.opset_imports["trt"] = 1
    ir.save(model, folder / "graph.onnx")
    plan = folder / "layer.plan"
    build_plan(
        FLAVOURS["tensorrt-rtx"],
        folder / "graph.onnx",
        plan,
        [Profile("all", {"R": (1, 8, 64)})],
        capability,
        silent,
    )
    return plan.stat().st_size


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer's experts in float32."""
    directory = tmp_path_factory.mktemp("experts")
    random, entries = np.random.default_rng(0), []
    for name in (
        f"{EXPERTS}.{e}.{projection}_proj.weight" for e in range(COUNT) for projection in PROJECTIONS
    ):
        w = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        entries.append(Entry(name, "F32", w.shape, [(name, w)]))
    (directory / "config.json").write_text("{}")
    write_shard(directory / "model.safetensors", entries)
    return directory


@packed_in_plans
def test_plans_keep_experts_packed(
    tmp_path: Path, experts: Path, scheme: str, calibrated: bool, capability: int, dtype: str
) -> None:
    layers = [f"{EXPERTS}.{e}.{projection}_proj" for projection in PROJECTIONS for e in range(COUNT)]
    amax = dict.fromkeys(layers, 4.0) if calibrated else None
    folder = quantize(experts, tmp_path / "quantized", scheme, calibration=amax)
    if scheme == "int4":
        folder = int4_by_row(Checkpoint(folder), tmp_path / "by-row", silent)
    checkpoint, stacks = Checkpoint(folder), dict[Projection, Stack]()
    for i, projection in enumerate(PROJECTIONS):
        stored = stored_experts(checkpoint, layers[i * COUNT : (i + 1) * COUNT], WIDTH, WIDTH)
        stacks[projection] = Stack(WIDTH, WIDTH, tuple(stored or ()))
    dialect = TensorRT(ir.DataType[dtype])
    g = GraphBuilder("test", dtype=dialect.dtype)
    x = g.input("x", dialect.dtype, ["R", WIDTH])
    router = g.input("router", FLOAT, ["R", COUNT])
    y = dialect.quantized_experts(g, x, router, stacks, ".", k=2, widened_bytes=0)
    g.output(y, "y", dialect.dtype, ["R", WIDTH])
    weights = len(layers) * WIDTH * WIDTH
    packed = PACKED[scheme] * weights
    assert packed <= plan_bytes(g, folder, capability) < packed + 4 * KERNELS < 2 * weights


@pytest.mark.parametrize(
    ("precision", "capability", "message"),
    [
        ("target=nvfp4", 89, "89: has no NVFP4 arithmetic"),
        ("head=mxfp4", 86, "86: has no MXFP4 arithmetic"),
        ("drafter=fp8", 80, "80: has no FP8 arithmetic"),
    ],
)
def test_formats_a_gpu_lacks_are_refused(
    tmp_path: Path, precision: str, capability: int, message: str
) -> None:
    with pytest.raises(BuildError, match=message):
        build(
            "tiny",
            None,
            tmp_path / "bundle",
            engine="tensorrt-rtx",
            options=TensorRTOptions((capability,)),
            precision=parse_precision(precision),
        )
    assert not (tmp_path / "bundle").exists()
