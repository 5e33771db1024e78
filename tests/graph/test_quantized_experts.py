"""Quantized experts on ONNX Runtime and for TensorRT, compared with NumPy: every format, scales per expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from dflash_plugins.launch import by_triton
from dflash_plugins.packed import PackedWeight
from safetensors.numpy import save_file

from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_experts, stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.engines.torch import kernels
from dflash_trt.engines.torch.kernels import LayerKernels
from dflash_trt.engines.torch.program import Graph
from dflash_trt.errors import CheckpointError
from dflash_trt.graph import onnxruntime as functions
from dflash_trt.graph import tensorrt
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.graph.torch import Torch
from dflash_trt.quantization.repack import in_blocks, int4_by_row
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.formats import GROUP, layer, widen
from tests.doubles.quantized_checkpoints import encoded, rounded, write_quant_config, write_safetensors
from tests.doubles.sessions import executed, session
from tests.doubles.trt_bodies import executable

Array = np.ndarray[Any, Any]
EXPERTS, HIDDEN, INNER, K = 6, 128, 192, 2
SHAPES: dict[Projection, tuple[int, int]] = {
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
# Algorithm, whether its inputs have static scales, and AWQ's factors. The last one keeps its down projections in
# BF16.
FORMATS = {
    "FP8": ("FP8", True, False), "FP8 by channel": ("FP8_PER_CHANNEL_PER_TOKEN", False, False),
    "NVFP4": ("NVFP4", False, False), "NVFP4, static": ("NVFP4", True, False),
    "NVFP4, smoothed": ("NVFP4_AWQ", True, True), "W4A16_NVFP4": ("W4A16_NVFP4", False, False),
    "MXFP4": ("MXFP4", False, False), "AWQ": ("W4A16_AWQ", False, True), "W8A16": ("W8A16", False, False),
    "FP8, down not": ("FP8", True, False),
}  # fmt: skip


def write(directory: Path, name: str, **changes: Any) -> Checkpoint:
    """Random experts of different magnitude. `changes` replace tensors, or remove them if None."""
    algorithm, static, smoothed = FORMATS[name]
    random, tensors = np.random.default_rng(0), dict[str, Any]()
    for e in range(EXPERTS):
        for projection, (rows, columns) in SHAPES.items():
            layer = f"experts.{e}.{projection}_proj"
            w = (2.0 ** (e - 3) * columns**-0.5 * random.standard_t(4, (rows, columns))).astype(np.float32)
            if projection == "down" and name.endswith("down not"):
                tensors[f"{layer}.weight"] = w
                continue
            tensors |= encoded(layer, algorithm, w)
            if static:
                top = 448 if algorithm == "FP8" else 2688
                tensors[f"{layer}.input_scale"] = np.float32((e + 2.5) / top)
            if smoothed:
                tensors[f"{layer}.pre_quant_scale"] = random.uniform(0.5, 2, columns).astype(np.float32)
    tensors |= {key.replace("__", "."): value for key, value in changes.items()}
    directory.mkdir(exist_ok=True)
    write_safetensors(directory / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})
    write_quant_config(directory, algorithm)
    return Checkpoint(directory)


def stacks_of(checkpoint: Checkpoint) -> dict[Projection, Stack]:
    found: dict[Projection, Stack] = {}
    for name, (rows, columns) in SHAPES.items():
        layers = [f"experts.{e}.{name}_proj" for e in range(EXPERTS)]
        stored = stored_experts(checkpoint, layers, columns, rows)
        plain = () if stored else tuple(checkpoint[f"{layer}.weight"] for layer in layers)
        found[name] = Stack(rows, columns, tuple(stored or ()), plain)
    return found


def model(checkpoint: Checkpoint, dialect: Dialect, *, widened_bytes: int = 0, folder: str = ".") -> ir.Model:
    g = GraphBuilder("layer", dtype=dialect.dtype)
    x, router = g.input("x", dialect.dtype, ["rows", HIDDEN]), g.input("router", FLOAT, ["rows", EXPERTS])
    y = dialect.quantized_experts(
        g,
        x,
        router,
        ExpertLayer(stacks=stacks_of(checkpoint), folder=folder, k=K, widened_bytes=widened_bytes),
    )
    g.output(y, "y", dialect.dtype, ["rows", HIDDEN])
    return g.model()


def reference(checkpoint: Checkpoint, x: Array, router: Array) -> Array:
    """Row by row, expert by expert."""
    y = np.zeros((len(x), HIDDEN))
    for row, logits in enumerate(router.astype(np.float64)):
        chosen = np.argsort(-logits)[:K]
        shares = np.exp(logits[chosen] - logits[chosen].max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            gate, up = (
                linear(checkpoint, f"experts.{e}.{name}_proj", x[row : row + 1]) for name in ("gate", "up")
            )
            hidden = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
            y[row] += share * linear(checkpoint, f"experts.{e}.down_proj", hidden)[0]
    return y


def linear(checkpoint: Checkpoint, layer: str, x: Array) -> Array:
    rows, columns = SHAPES["down"] if "down" in layer else SHAPES["gate"]
    stored = stored_linear(checkpoint, layer, columns, rows)
    if stored is None:
        return x.astype(np.float64) @ checkpoint.array(f"{layer}.weight").T.astype(np.float64)
    if stored.pre_quant_scale is not None:
        x = x * checkpoint.array(stored.pre_quant_scale.name)
    scale = None if stored.input_scale is None else checkpoint.array(stored.input_scale.name).item()
    x = rounded(stored.algorithm.name, x, scale)
    return x.astype(np.float64) @ widen(checkpoint, stored).T.astype(np.float64)


def feeds(rows: int, seed: int = 1) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    x = random.standard_t(4, (rows, HIDDEN)).astype(np.float32)
    return {"x": x, "router": random.normal(0, 2, (rows, EXPERTS)).astype(np.float32)}


INTEGERS = ("AWQ", "W8A16", "awq", "gptq_v2", "gptq")


def in_cpu_blocks(tmp_path: Path, name: str) -> tuple[Checkpoint, Checkpoint]:
    """Experts as a build for ONNX Runtime writes them to `tmp_path`, and their numbers."""
    source, plain = words(tmp_path, name) if name in WORDS else (write(tmp_path / "source", name),) * 2
    return in_blocks(source, tmp_path, silent), plain


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "in use"])
@pytest.mark.parametrize("name", INTEGERS)
def test_onnxruntime_against_numpy(tmp_path: Path, name: str, resident: bool) -> None:
    checkpoint, plain = in_cpu_blocks(tmp_path, name)
    size = 0 if resident else functions.RESIDENT_EXPERT_BYTES + 1
    ir.save(model(checkpoint, OnnxRuntime(), widened_bytes=size), tmp_path / "model.onnx")
    run = session(tmp_path / "model.onnx", optimized_model_filepath=str(tmp_path / "optimized.onnx"))
    for rows in (1, 3, 20):
        inputs = feeds(rows)
        expected = reference(plain, **inputs)
        (y,) = run.run(None, inputs)
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # Widened once when the engine loads, or only in the loop.
    graph = ir.load(tmp_path / "optimized.onnx").graph
    assert "Sub" not in {node.op_type for node in graph}
    everywhere = {node.op_type for node in ir.traversal.RecursiveGraphIterator(graph)}
    assert ("Sub" in everywhere) == (not resident)


def test_a_pass_widens_the_experts_that_some_row_chose(tmp_path: Path) -> None:
    checkpoint, _ = in_cpu_blocks(tmp_path, "AWQ")
    ir.save(model(checkpoint, OnnxRuntime(), widened_bytes=1 << 40), tmp_path / "model.onnx")
    for rows in (1, 2, 9):
        run = session(
            tmp_path / "model.onnx", enable_profiling=True, profile_file_prefix=str(tmp_path / "profile")
        )
        inputs = feeds(rows)
        run.run(None, inputs)
        chosen = np.unique(np.argsort(-inputs["router"], axis=1)[:, :K])
        widened = [
            int(event["args"]["output_size"])
            for event in executed(run)
            if "/widened_by_block" in event["name"]
        ]
        assert sum(widened) == len(chosen) * 3 * 4 * HIDDEN * INNER


@pytest.mark.parametrize("widened_bytes", [1 << 28, 0], ids=["at once", "two at a time"])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "W8A16"])
def test_what_tensorrt_gets_against_numpy(
    tmp_path: Path, name: str, widened_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with TensorRT's own operators as functions of standard ones."""
    monkeypatch.setattr(tensorrt, "WIDENED_BYTES", widened_bytes)
    checkpoint = write(tmp_path / "source", name)
    checkpoint = int4_by_row(checkpoint, tmp_path, silent) if name == "AWQ" else write(tmp_path, name)
    exported = model(checkpoint, TensorRT(FLOAT))
    assert sum(node.op_type == "ReduceSum" for node in exported.graph) == (
        1 if widened_bytes else EXPERTS // 2
    )
    document = ir.to_proto(exported)
    document.opset_import.append(onnx.helper.make_opsetid("trt", 1))
    onnx.external_data_helper.load_external_data_for_model(document, str(tmp_path))
    onnx.save(executable(document), tmp_path / "model.onnx")
    given = feeds(9)
    expected = reference(checkpoint, **given)
    (y,) = session(tmp_path / "model.onnx").run(None, given)
    error = np.linalg.norm(y - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(error) < 1e-5
    assert error.max() < 0.05


WORDS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True},
    "gptq_v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "format": "gptq_v2"},
    "gptq": {"quant_method": "gptq", "bits": 8, "group_size": GROUP},
}  # fmt: skip


def words(tmp_path: Path, method: str) -> tuple[Checkpoint, Checkpoint]:
    """Experts as this method stores them, and their numbers. Some are symmetric, and one has no order."""
    config, random = WORDS[method], np.random.default_rng(0)
    stored, plain = dict[str, Any](), dict[str, Any]()
    for e in range(EXPERTS):
        for projection, (rows, columns) in SHAPES.items():
            name = f"experts.{e}.{projection}_proj"
            w = (columns**-0.5 * random.standard_t(4, (rows, columns))).astype(np.float32)
            ordered = bool(config.get("desc_act")) and e != 1
            found, numbers = layer(w, method, config["bits"], symmetric=e % 2 == 0, ordered=ordered)
            stored |= {f"{name}.{end}": value for end, value in found.items()}
            plain[f"{name}.weight"] = numbers.astype(np.float32)
    for place, tensors, said in (("stored", stored, {"quantization_config": config}), ("plain", plain, {})):
        (tmp_path / place).mkdir()
        (tmp_path / place / "config.json").write_text(json.dumps(said))
        save_file(tensors, tmp_path / place / "model.safetensors")
    return Checkpoint(tmp_path / "stored"), Checkpoint(tmp_path / "plain")


@pytest.mark.parametrize("method", WORDS)
def test_tensorrt_experts_with_zero_points(tmp_path: Path, method: str) -> None:
    """All get a second product, and all an order where one has it."""
    stored, plain = words(tmp_path, method)
    checkpoint = int4_by_row(stored, tmp_path, silent)
    document = ir.to_proto(model(checkpoint, TensorRT(FLOAT)))
    onnx.external_data_helper.load_external_data_for_model(document, str(tmp_path))
    onnx.save(executable(document), tmp_path / "model.onnx")
    given = feeds(9)
    (y,) = session(tmp_path / "model.onnx").run(None, given)
    expected = reference(plain, **given)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", [*FORMATS, *WORDS])
def test_what_torch_gets_against_numpy(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU and in float32 widened once; on a GPU, stacks that stay as they are stored."""
    made = words(tmp_path, name) if name in WORDS else (write(tmp_path / "source", name),) * 2
    checkpoint, plain = made
    checkpoint = int4_by_row(checkpoint, tmp_path / "by-row", silent)

    def graph(dtype: ir.DataType) -> Graph:
        ir.save(model(checkpoint, Torch(dtype), folder=checkpoint.directory.name), tmp_path / "model.onnx")
        return Graph(tmp_path / "model.onnx", torch.device("cpu"))

    exact, given = graph(FLOAT), {n: torch.from_numpy(x) for n, x in feeds(9).items()}
    assert not [weight for weight in exact.weights.values() if isinstance(weight, PackedWeight)]
    expected = reference(plain, **feeds(9))
    error = np.linalg.norm(exact.first_pass(given)[1]["y"].numpy() - expected, axis=1)
    assert np.median(error / np.linalg.norm(expected, axis=1)) < 1e-5
    assert (error / np.linalg.norm(expected, axis=1)).max() < 0.05
    if name in ("NVFP4, static", "NVFP4, smoothed", "W4A16_NVFP4", "awq"):
        return  # packed like the experts of another name
    whole, interpreted = graph(ir.DataType.BFLOAT16), LayerKernels(by_triton)
    given["x"] = given["x"].bfloat16()
    theirs = whole.first_pass(given)[1]["y"].float()
    monkeypatch.setattr(kernels, "of", lambda _: interpreted)
    packed = graph(ir.DataType.BFLOAT16)
    _, first = packed.first_pass(given)
    (alone,) = packed.first_pass({n: x[4:5] for n, x in given.items()})[1].values()
    assert torch.equal(alone, first["y"][4:5])  # whatever the others choose
    stacks = [weight for weight in packed.weights.values() if isinstance(weight, PackedWeight)]
    assert len(stacks) == (2 if name.endswith("down not") else 3)
    assert (first["y"].float() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("FP8", {"experts__4__up_proj__weight_scale": None}, r"no tensor 'experts\.4\.up_proj\.weight_scale', but"),
        (
            "NVFP4",
            {"experts__2__down_proj__weight": np.zeros((HIDDEN, INNER), np.uint8)},
            r"'experts\.2\.down_proj\.weight' is U8 \[128, 192\], but in NVFP4 it is U8 \[128, 96\]",
        ),
        (
            "NVFP4",
            {"experts__3__gate_proj__input_scale": np.float32(1)},
            r"experts\.3\.gate_proj\.input_scale is F32 \[\], but experts\.0\.gate_proj\.input_scale is not there",
        ),
        (
            "FP8",
            {"experts__5__gate_proj__weight": np.zeros((INNER, HIDDEN), np.float32)},
            r"experts\.5\.gate_proj\.weight is in floating point, but experts\.0\.gate_proj\.weight is F8_E4M3 \[192, ",
        ),
        (
            "FP8",
            {"experts__1__up_proj__weight_scale": np.ones(INNER, np.float32)},
            r"experts\.1\.up_proj\.weight_scale is F32 \[192\], but experts\.0\.up_proj\.weight_scale is F32 \[\]",
        ),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_named(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        stacks_of(write(tmp_path, name, **changes))
    assert "\n" not in str(error.value)


def test_experts_of_several_algorithms_are_refused(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, "NVFP4")
    layers = [f"experts.{e}.up_proj" for e in range(EXPERTS)]
    each = {layer: {"quant_algo": "NVFP4" if e != 2 else "W4A16_NVFP4"} for e, layer in enumerate(layers)}
    write_quant_config(tmp_path, "MIXED_PRECISION", quantized_layers=each)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"2\.up_proj\.weight is U8 .* but experts\.0"):
        stored_experts(checkpoint, layers, HIDDEN, INNER)
