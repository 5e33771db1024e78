"""Scratch memory of plans with quantized experts: space for the widened weights of one product, not of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_experts
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.engines.tensorrt.builder import Profile, build_plan
from dflash_trt.engines.tensorrt.options import FLAVOURS
from dflash_trt.graph import tensorrt_experts
from dflash_trt.graph.builder import FLOAT, GraphBuilder
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


def test_scratch_memory_holds_what_one_product_widens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoint"
    add = qwen3_moe(directory)

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
