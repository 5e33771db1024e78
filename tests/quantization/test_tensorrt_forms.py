"""The forms in which checkpoints are published, in TensorRT-RTX without a GPU: plans keep their bytes, and the nodes
compute what the forms mean.

Plans of narrow layers are built for SM89 and SM120. Numbers are those of ONNX Runtime on the same nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import StoredLinear, stored_experts
from dflash_trt.checkpoint.tensors import Checkpoint, TensorInfo
from dflash_trt.checkpoint.writer import Entry, write_shard
from dflash_trt.engines.tensorrt.builder import Profile, build_plan
from dflash_trt.engines.tensorrt.options import FLAVOURS, TensorRTOptions
from dflash_trt.errors import BuildError
from dflash_trt.formats.base import Algorithm
from dflash_trt.formats.numbers import E2M1, E4M3, E8M0, unpack_pairs
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized_experts import ExpertLayer, Projection, Stack
from dflash_trt.graph.tensorrt import TensorRT
from dflash_trt.quantization.convert import quantize
from dflash_trt.quantization.repack import int4_by_row
from tests.doubles.trt_bodies import executable
from tests.quantization.test_downloaded import moe, pair, written

__all__ = ["moe", "pair"]

Tensors = dict[str, tuple[str, np.ndarray]]
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
RNG = np.random.default_rng(0)
COUNT, WIDTH = 8, 768  # experts of a layer
PROJECTIONS: tuple[Projection, ...] = ("gate", "up", "down")
# Bytes per weight with its scales.
PACKED = {"fp8": 1.0, "nvfp4": 0.5625, "mxfp4": 0.53125, "int4": 0.515625}
# Bytes of kernels that a plan has beside its weights, whatever their size.
KERNELS = 800_000


class Form:
    """A published form: the tensors of a layer [rows, columns], and the weight that they mean."""

    def __init__(
        self, algorithm: Algorithm, make: Callable[[int, int], tuple[Tensors, np.ndarray]], bits: int = 16
    ) -> None:
        self.algorithm, self.make, self.bits = algorithm, make, bits

    def write(self, folder: Path, rows: int, columns: int) -> tuple[StoredLinear, np.ndarray]:
        folder.mkdir()
        found, weight = self.make(rows, columns)
        entries = [Entry(name, dtype, value.shape, [(name, value)]) for name, (dtype, value) in found.items()]
        (folder / "config.json").write_text("{}")
        write_shard(folder / "model.safetensors", entries)
        tensors = Checkpoint(folder).tensors
        names = ("weight", "scale", "global_scale", "input_scale", "pre_quant_scale", "zero_term", "order")
        given: dict[str, TensorInfo | None] = {name: tensors.get(name) for name in names}
        return StoredLinear(self.algorithm, **given), weight


def scales(*shape: int, dtype: str) -> np.ndarray:
    return RNG.uniform(0.005, 0.02, shape).astype(DTYPES[dtype])


def fp8(rows: int, columns: int) -> np.ndarray:
    return RNG.integers(0, 0x70, (rows, columns)).astype(np.uint8).view(E4M3)


def fp8_blocks(dtype: str) -> Form:
    def make(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes, scale = fp8(rows, columns), scales(-(-rows // 128), -(-columns // 128), dtype=dtype)
        factors = np.repeat(np.repeat(scale.astype(np.float32), 128, 0), 128, 1)[:rows, :columns]
        return {"weight": ("F8_E4M3", codes), "scale": (dtype, scale)}, codes.astype(np.float32) * factors

    return Form(Algorithm("FP8_BLOCK", "fp8", group_size=128, group_rows=128), make)


def fp8_rows(dtype: str, columns_of_scale: bool) -> Form:
    def make(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes, scale = fp8(rows, columns), scales(rows, *[1] * columns_of_scale, dtype=dtype)
        weight = codes.astype(np.float32) * scale.astype(np.float32).reshape(-1, 1)
        return {"weight": ("F8_E4M3", codes), "scale": (dtype, scale)}, weight

    return Form(Algorithm("FP8", "fp8"), make)


def fp8_whole() -> Form:
    """With one scale for the weight, and one for inputs."""

    def make(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes, scale = fp8(rows, columns), scales(dtype="F32")
        found: Tensors = {"weight": ("F8_E4M3", codes), "scale": ("F32", scale)}
        return found | {"input_scale": ("F32", np.float32([0.01]))}, codes.astype(np.float32) * scale

    return Form(Algorithm("FP8", "fp8", activations=True, static=True), make)


def mxfp4(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    codes = RNG.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
    exponents = RNG.integers(118, 123, (rows, columns // 32)).astype(np.uint8)
    weight = E2M1[unpack_pairs(codes)] * np.repeat(E8M0[exponents], 32, axis=1)
    return {"weight": ("U8", codes), "scale": ("U8", exponents)}, weight


def mxfp8(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
    codes, exponents = fp8(rows, columns), RNG.integers(118, 123, (rows, columns // 32)).astype(np.uint8)
    weight = codes.astype(np.float32) * np.repeat(E8M0[exponents], 32, axis=1)
    return {"weight": ("F8_E4M3", codes), "scale": ("U8", exponents)}, weight


def nvfp4(*, reciprocal: bool, activations: bool) -> Form:
    def make(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes = RNG.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
        scale = RNG.integers(0x30, 0x48, (rows, columns // 16)).astype(np.uint8).view(E4M3)
        second = np.float32(0.0078125)
        weight = E2M1[unpack_pairs(codes)] * np.repeat(scale.astype(np.float32) * second, 16, axis=1)
        stored = np.array([1 / second if reciprocal else second], np.float32)
        found: Tensors = {
            "weight": ("U8", codes),
            "scale": ("F8_E4M3", scale),
            "global_scale": ("F32", stored),
        }
        return found | ({"input_scale": ("F32", stored)} if activations else {}), weight

    return Form(
        Algorithm("NVFP4", "nvfp4", activations, activations, group_size=16, reciprocal=reciprocal), make
    )


def int4(group: int, dtype: str, *, zeros: bool = False, ordered: bool = False) -> Form:
    def make(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes = RNG.integers(0, 256, (rows, columns // 2)).astype(np.uint8)
        scale = scales(rows, columns // group, dtype=dtype)
        numbers = ((unpack_pairs(codes).astype(np.int8) ^ 8) - 8).astype(np.float32)
        found: Tensors = {"weight": ("U8", codes), "scale": (dtype, scale)}
        weight = numbers * np.repeat(scale.astype(np.float32), group, axis=1)
        if zeros:
            term = scale.astype(np.float32) * RNG.integers(-7, 8, scale.shape).astype(np.float32)
            found["zero_term"] = ("F32", term)
            weight += np.repeat(term, group, axis=1)
        if ordered:
            order = RNG.permutation(columns).astype(np.int64)
            found["order"] = ("I64", order)
            weight = weight[:, np.argsort(order)]
        return found, weight

    return Form(Algorithm("W4A16", "int4", group_size=group, ordered=ordered), make)


def int8(group: int) -> Form:
    def make(rows: int, columns: int) -> tuple[Tensors, np.ndarray]:
        codes = RNG.integers(-128, 128, (rows, columns)).astype(np.int8)
        scale = scales(rows, columns // (group or columns), dtype="BF16")
        weight = codes * np.repeat(scale.astype(np.float32), group or columns, axis=1)
        return {"weight": ("I8", codes), "scale": ("BF16", scale)}, weight

    return Form(Algorithm("W8A16", "int8", group_size=group), make)


FORMS = {
    "fp8 blocks, BF16 scales": fp8_blocks("BF16"),
    "fp8 blocks, F32 scales": fp8_blocks("F32"),
    "fp8 rows, BF16 scales": fp8_rows("BF16", True),
    "fp8 rows, F32 scales": fp8_rows("F32", False),
    "fp8 whole, inputs too": fp8_whole(),
    "mxfp4": Form(Algorithm("MXFP4", "mxfp4", group_size=32), mxfp4),
    "mxfp8": Form(Algorithm("MXFP8", "fp8", group_size=32), mxfp8),
    "nvfp4, reciprocal": nvfp4(reciprocal=True, activations=False),
    "nvfp4, inputs too": nvfp4(reciprocal=True, activations=True),
    "nvfp4 of Model Optimizer": nvfp4(reciprocal=False, activations=True),
    "int4 in 128": int4(128, "BF16"),
    "int4 in 64": int4(64, "F32"),
    "int4 in 32": int4(32, "F16"),
    "int4, zero points": int4(128, "BF16", zeros=True),
    "int4, ordered": int4(128, "BF16", ordered=True),
    "int8 in 128": int8(128),
    "int8 in 32": int8(32),
    "int8 rows": int8(0),
}


def graph(stored: StoredLinear, dtype: ir.DataType, columns: int, times: int = 1) -> GraphBuilder:
    """The layer, as often as asked: then names must not clash."""
    g = GraphBuilder("test", dtype=dtype)
    x = g.input("x", dtype, ["R", columns])
    for i in range(times):
        x = TensorRT(dtype).quantized_linear(g, x, stored, ".", None, name=f"layer{i}", widened_bytes=0)
    g.output(x, "y", dtype, ["R", stored.weight.shape[0]])
    return g


def saved(g: GraphBuilder, folder: Path) -> Path:
    model = g.model()
    model.graph.opset_imports["trt"] = 1
    ir.save(model, folder / "graph.onnx")
    return folder / "graph.onnx"


def plan_bytes(g: GraphBuilder, folder: Path, capability: int) -> int:
    file, profile = saved(g, folder), Profile("all", {"R": (1, 8, 64)})
    build_plan(FLAVOURS["tensorrt-rtx"], file, folder / "layer.plan", [profile], capability, silent)
    return (folder / "layer.plan").stat().st_size


@pytest.mark.parametrize("form", FORMS)
def test_the_nodes_compute_what_the_form_means(tmp_path: Path, form: str) -> None:
    """In float32, with TensorRT's operators replaced by what NVIDIA documents. 192 rows end within a block."""
    stored, weight = FORMS[form].write(tmp_path / "layer", 192, 320 if "blocks" in form else 256)
    x = RNG.standard_normal((5, weight.shape[1])).astype(np.float32)
    model = onnx.load(saved(graph(stored, FLOAT, weight.shape[1]), tmp_path / "layer"))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(executable(model).SerializeToString(), options)
    (found,) = session.run(None, {"x": x})
    exact = x @ weight.T
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error < (0.2 if stored.algorithm.activations else 1e-5), error


@pytest.mark.parametrize(("capability", "dtype"), [(89, "BFLOAT16"), (120, "FLOAT16")])
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_has_the_bytes_of_the_checkpoint(
    tmp_path: Path, form: str, capability: int, dtype: str
) -> None:
    """At most 5% more, beside kernels: those of a narrow layer weigh as much as its weights."""
    if form.startswith(("nvfp4", "mxfp4")) and capability == 89:
        pytest.skip("has no arithmetic in four bits")
    stored, _ = FORMS[form].write(tmp_path / "layer", 2048, 2048)
    size = sum(info.nbytes for info in stored.tensors)
    made = plan_bytes(graph(stored, ir.DataType[dtype], 2048, times=2), tmp_path / "layer", capability)
    assert stored.weight.nbytes <= made < 1.05 * size + KERNELS


@pytest.mark.parametrize(
    ("scheme", "capability", "dtype"),
    [
        ("fp8", 89, "BFLOAT16"),
        ("fp8", 120, "FLOAT16"),
        ("nvfp4", 121, "FLOAT16"),
        ("mxfp4", 120, "BFLOAT16"),
        ("int4", 80, "BFLOAT16"),
        ("int4", 120, "FLOAT16"),
    ],
)
def test_plans_keep_experts_packed(tmp_path: Path, scheme: str, capability: int, dtype: str) -> None:
    """Each scheme, in both dtypes, for GPUs of several generations."""
    experts = {p: [f"layers.0.mlp.experts.{e}.{p}_proj" for e in range(COUNT)] for p in PROJECTIONS}
    entries = []
    for name in (f"{layer}.weight" for layers in experts.values() for layer in layers):
        w = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        entries.append(Entry(name, "F32", w.shape, [(name, w)]))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    write_shard(tmp_path / "source" / "model.safetensors", entries)
    folder = quantize(tmp_path / "source", tmp_path / "quantized", scheme)
    if scheme == "int4":
        folder = int4_by_row(Checkpoint(folder), tmp_path / "by-row", silent)
    checkpoint, stacks = Checkpoint(folder), dict[Projection, Stack]()
    for projection, layers in experts.items():
        stored = stored_experts(checkpoint, layers, WIDTH, WIDTH)
        stacks[projection] = Stack(WIDTH, WIDTH, tuple(stored or ()))
    dialect = TensorRT(ir.DataType[dtype])
    g = GraphBuilder("test", dtype=dialect.dtype)
    x, router = g.input("x", dialect.dtype, ["R", WIDTH]), g.input("router", FLOAT, ["R", COUNT])
    y = dialect.quantized_experts(g, x, router, ExpertLayer(stacks=stacks, folder=".", k=2, widened_bytes=0))
    g.output(y, "y", dialect.dtype, ["R", WIDTH])
    weights = len(entries) * WIDTH * WIDTH
    packed = PACKED[scheme] * weights
    assert packed <= plan_bytes(g, folder, capability) < packed + 4 * KERNELS < 2 * weights


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (64, 256), (256, 64)])
def test_a_layer_of_one_block_is_built(tmp_path: Path, rows: int, columns: int) -> None:
    """The parser refuses blocks where there is only one of them."""
    stored, _ = fp8_blocks("BF16").write(tmp_path / "layer", rows, columns)
    assert plan_bytes(graph(stored, ir.DataType.BFLOAT16, columns), tmp_path / "layer", 89)


def test_a_block_of_exponents_is_a_power_of_two(tmp_path: Path) -> None:
    """Scales in one byte, as DeepSeek's later checkpoints have them."""
    stored, _ = fp8_blocks("F32").write(tmp_path / "layer", 256, 256)
    exponents = np.array([[120, 121], [122, 127]], np.uint8)
    write_shard(tmp_path / "scale.safetensors", [Entry("scale", "U8", (2, 2), [("scale", exponents)])])
    (tmp_path / "layer" / "model-scale.safetensors").write_bytes(
        (tmp_path / "scale.safetensors").read_bytes()
    )
    info = replace(stored.scale, dtype="U8", nbytes=4, file=tmp_path / "layer" / "model-scale.safetensors")
    header = int.from_bytes(info.file.read_bytes()[:8], "little")
    stored = replace(stored, scale=replace(info, offset=8 + header))
    file = saved(graph(stored, FLOAT, 256), tmp_path / "layer")
    session = ort.InferenceSession(executable(onnx.load(file)).SerializeToString())
    (found,) = session.run(None, {"x": np.eye(256, dtype=np.float32)})
    codes = Checkpoint(tmp_path / "layer").array("weight").astype(np.float32)
    np.testing.assert_array_equal(found.T, codes * np.repeat(np.repeat(E8M0[exponents], 128, 0), 128, 1))


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


def test_fp8_is_refused_where_a_gpu_lacks_it() -> None:
    flavour = FLAVOURS["tensorrt-rtx"]
    with pytest.raises(BuildError, match=r"86: has no FP8 arithmetic.*--precision target=int4"):
        flavour.check_capabilities([86], [], formats=["fp8"])
    assert flavour.check_capabilities([86], [], formats=["int8", "int4"]) == (86,)


@pytest.mark.parametrize("name", ["FP8_BLOCK", "mixed", "W4A16_ASYM", "W8A16", "GPTQ 2, ordered"])
def test_a_downloaded_checkpoint_becomes_plans(
    pair: tuple[Path, Path],
    tmp_path: Path,
    name: str,
) -> None:
    """As other programs write it, from its configuration to plans with its numbers."""
    stored = stored_in_plan(name, pair, tmp_path)
    expected = {"FP8_BLOCK": {"FLOAT8E4M3FN"}, "mixed": {"FLOAT8E4M3FN", "FLOAT4E2M1"}, "W8A16": {"INT8"}}
    assert expected.get(name, {"INT4"}) <= {*stored}


@pytest.mark.parametrize("name", ["GPTQ 2, ordered", "AWQ"])
def test_downloaded_experts_become_plans(moe: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    assert "INT4" in stored_in_plan(name, moe, tmp_path)


def stored_in_plan(name: str, pair: tuple[Path, Path], folder: Path) -> dict[str, int]:
    """Bytes of weights in the target's plan, by dtype."""
    written(name, pair[0], folder / "target")
    options = TensorRTOptions((120,), max_batch_size=1, prefill_chunk=32)
    sources = str(folder / "target"), str(pair[1])
    bundle = build(*sources, folder / "b", engine="tensorrt-rtx", max_seq_len=64, options=options)
    found: dict[str, int] = bundle.manifest["tensorrt"]["plans"]["120"]["target"]["weight_bytes"]
    return found
