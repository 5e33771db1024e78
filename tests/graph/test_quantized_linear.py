"""The quantized linear operators on ONNX Runtime, compared with NumPy: every format, every kind of activation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized import INPUTS, onnxruntime_linear, operator_name, tensors
from tests.doubles.formats import widen
from tests.doubles.quantized_checkpoints import rounded, write_layer
from tests.doubles.sessions import session

IN, OUT = 256, 48
FORMATS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A16_MXFP4", "W4A16_AWQ", "W8A16"]


def run(checkpoint: Checkpoint, x: np.ndarray, *, biased: bool, resident: bool) -> np.ndarray:
    directory = checkpoint.directory
    stored = stored_linear(checkpoint, "l", IN, OUT)
    assert stored is not None
    g = GraphBuilder("test")
    inputs = tensors(g, stored, ".", packed_as_bytes=True)
    if biased:
        inputs["bias"] = g.raw_weight(checkpoint["l.bias"], ".")
    body = onnxruntime_linear(stored, inputs, FLOAT, resident=resident)
    ordered = [inputs[name] for name in INPUTS if name in inputs]
    (y,) = g.call(body, g.input("x", FLOAT, ["rows", IN]), *ordered, name="linear")
    g.output(y, "y", FLOAT, ["rows", OUT])
    ir.save(g.model(), directory / "model.onnx")
    run = session(directory / "model.onnx", optimized_model_filepath=str(directory / "optimized.onnx"))
    return np.asarray(run.run(None, {"x": x})[0])


@pytest.mark.parametrize(
    ("algorithm", "static", "extras", "resident"),
    [
        (algorithm, static, extras, resident)
        for algorithm, static, extras, resident in itertools.product(
            FORMATS, (False, True), (False, True), (False, True)
        )
        if static is {"FP8": True, "NVFP4": static}.get(algorithm, False)
    ],
)
def test_matches_numpy(tmp_path: Path, algorithm: str, static: bool, extras: bool, resident: bool) -> None:
    random = np.random.default_rng(0)
    w = random.standard_t(3, (OUT, IN)).astype(np.float32)
    x = random.standard_t(3, (5, IN)).astype(np.float32)
    x[3], w[7] = 0, 0
    more: dict[str, Any] = {}
    input_scale = None
    if static:
        input_scale = float(np.abs(x).max() / (448 if algorithm == "FP8" else 2688))
        more["input_scale"] = np.float32(input_scale)
    smooth, bias = np.ones(IN, np.float32), np.zeros(OUT, np.float32)
    if extras:
        smooth, bias = random.uniform(0.5, 2, IN).astype(np.float32), random.standard_normal(OUT)
        more |= {"pre_quant_scale": smooth, "bias": bias.astype(np.float32)}
    checkpoint = write_layer(tmp_path, algorithm, w, **more)
    y = run(checkpoint, x, biased=extras, resident=resident)
    stored = stored_linear(checkpoint, "l", IN, OUT)
    assert stored is not None
    used = widen(checkpoint, stored)
    nearest = rounded(algorithm, x * smooth, input_scale)
    exact = nearest.astype(np.float64) @ used.T.astype(np.float64) + bias
    np.testing.assert_allclose(y, exact, rtol=1e-4, atol=1e-4)
    # Widened weights exist once, or never.
    kinds = {node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph}
    widening = {"DequantizeLinear", "GatherElements"} & kinds
    assert ("GatherElements" not in kinds) if resident else widening
    # The distance of the format itself from the layer.
    error = np.linalg.norm(used - w) / np.linalg.norm(w)
    assert error < (0.04 if algorithm.startswith("FP8") else 0.2)


def test_layers_with_other_inputs_have_other_operators(tmp_path: Path) -> None:
    """A graph has one body for each name."""
    plain = stored_linear(write_layer(tmp_path, "W8A16", np.ones((OUT, IN), np.float32)), "l", IN, OUT)
    assert plain is not None
    traits = [{}, *({name: plain.scale} for name in ("pre_quant_scale", "zero_point", "order"))]
    names = [operator_name(replace(plain, **each), biased=b) for each in traits for b in (False, True)]
    assert len(set(names)) == len(names)
