"""Scratch memory of plans with quantized experts: space for the widened weights of one product, not of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_experts
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.engines.tensorrt.builder import build_plan
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.profiles import Profile
from dflash_trt.graph import tensorrt_experts
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.experts import Experts
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.quantization.convert import quantize

WIDTH, COUNT, LAYERS = 512, 8, 2
MATRIX = 2 * WIDTH * WIDTH  # bytes of one matrix in BF16
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
AddLayer = Callable[[TensorRT, GraphBuilder, int, ir.Value, ir.Value], ir.Value]


def write(directory: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    entries = [Entry(name, dtype, value.shape, [(name, value)]) for name, value in tensors.items()]
    write_shard(directory / "model.safetensors", entries)


def qwen3_moe(directory: Path) -> AddLayer:
    """Separate linear layers, quantized."""
    random = np.random.default_rng(0)
    names = {
        (i, p): [f"layers.{i}.mlp.experts.{e}.{p}_proj" for e in range(COUNT)]
        for i in range(LAYERS)
        for p in PROJECTIONS
    }
    tensors = {
        f"{layer}.weight": random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        for layers in names.values()
        for layer in layers
    }
    write(directory.with_name("source"), tensors, "F32")
    checkpoint = Checkpoint(quantize(directory.with_name("source"), directory, "mxfp4"))

    def add(dialect: TensorRT, g: GraphBuilder, i: int, x: ir.Value, router: ir.Value) -> ir.Value:
        stacks = {
            p: Stack(WIDTH, WIDTH, tuple(stored_experts(checkpoint, names[i, p], WIDTH, WIDTH) or ()))
            for p in PROJECTIONS
        }
        return dialect.quantized_experts(
            g, x, router, ExpertLayer(stacks=stacks, folder=".", k=2, widened_bytes=0)
        )

    return add


def gpt_oss(directory: Path) -> AddLayer:
    """Blocks and scales of all experts of a layer together."""
    random = np.random.default_rng(0)
    shapes = {"gate_up": (COUNT, 2 * WIDTH, WIDTH // 32), "down": (COUNT, WIDTH, WIDTH // 32)}
    tensors: dict[str, np.ndarray] = {}
    for i in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"{i}.{name}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
            tensors[f"{i}.{name}_scales"] = random.integers(118, 122, shape, np.uint8)
    write(directory, tensors, "U8")
    checkpoint = Checkpoint(directory)

    def add(dialect: TensorRT, g: GraphBuilder, i: int, x: ir.Value, router: ir.Value) -> ir.Value:
        kinds = ("gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")
        found = {kind.removesuffix("_blocks"): g.raw_weight(checkpoint[f"{i}.{kind}"], ".") for kind in kinds}
        attributes: dict[str, Any] = {"k": 2, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
        experts = Experts(storage="mxfp4", **found)
        return dialect.experts(g, x, router, experts, widened_bytes=0, **attributes)

    return add


@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss])
def test_scratch_memory_holds_what_one_product_widens(
    tmp_path: Path, make: Callable[[Path], AddLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    add = make(directory)

    def scratch(layers: int) -> int:
        dialect = TensorRT(ir.DataType.BFLOAT16)
        g = GraphBuilder("test", dtype=dialect.dtype, opsets={"trt": 1})
        x, router = g.input("x", dialect.dtype, ["R", WIDTH]), g.input("router", FLOAT, ["R", COUNT])
        for i in range(layers):
            with g.scope(f"layers.{i}"):
                x = add(dialect, g, i, x, router)
        g.output(x, "y", dialect.dtype, ["R", WIDTH])
        ir.save(g.model(), directory / "graph.onnx")
        profiles = [Profile("many", {"R": (1, 8, 64)})]
        flavour, files = FLAVOURS["tensorrt-rtx"], (directory / "graph.onnx", directory / "graph.plan")
        return int(build_plan(flavour, *files, profiles, 120, silent)["activation_bytes"])

    at_once = scratch(1)
    monkeypatch.setattr(tensorrt_experts, "WIDENED_BYTES", 0)
    two, of_all_layers = scratch(1), scratch(LAYERS)
    assert two < at_once - 2 * MATRIX
    assert of_all_layers - two < MATRIX
