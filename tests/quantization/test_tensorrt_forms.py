"""The forms in which checkpoints are published, in TensorRT-RTX without a GPU: plans keep their bytes, widened little.

Plans of narrow layers are built for SM89 and SM120. test_logits.py has their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
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
from dflash_trt.formats.numbers import E4M3, E8M0
from dflash_trt.formats.precision import parse_precision
from dflash_trt.graph import tensorrt
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.quantized import QuantizedLinear
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


Make = Callable[[int, int], Tensors]


def scales(*shape: int, dtype: str = "BF16") -> tuple[str, np.ndarray]:
    return dtype, RNG.uniform(0.005, 0.02, shape).astype(DTYPES[dtype])


def bytes_(*shape: int, low: int = 0, high: int = 256) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(np.uint8)


def fp8(scale: Callable[[int, int], tuple[str, np.ndarray]], **more: tuple[str, np.ndarray]) -> Make:
    def make(rows: int, columns: int) -> Tensors:
        codes = bytes_(rows, columns, high=0x70).view(E4M3)
        return {"weight": ("F8_E4M3", codes), "scale": scale(rows, columns), **more}

    return make


def fp4(scale: Callable[[int, int], tuple[str, np.ndarray]], **more: tuple[str, np.ndarray]) -> Make:
    return lambda rows, columns: {
        "weight": ("U8", bytes_(rows, columns // 2)),
        "scale": scale(rows, columns),
        **more,
    }


def exponents(rows: int, columns: int) -> tuple[str, np.ndarray]:
    return "U8", bytes_(rows, columns // 32, low=118, high=123)


def blocks(dtype: str) -> Make:
    return fp8(lambda rows, columns: scales(-(-rows // 128), -(-columns // 128), dtype=dtype))


def nvfp4(*, activations: bool) -> Make:
    one = ("F32", np.array([0.0078125], np.float32))
    more = {"global_scale": one, **({"input_scale": one} if activations else {})}
    return fp4(
        lambda rows, columns: ("F8_E4M3", bytes_(rows, columns // 16, low=0x30, high=0x48).view(E4M3)), **more
    )


def int4(group: int, dtype: str, *, zeros: bool = False, ordered: bool = False) -> Make:
    def make(rows: int, columns: int) -> Tensors:
        found: Tensors = {
            "weight": ("U8", bytes_(rows, columns // 2)),
            "scale": scales(rows, columns // group, dtype=dtype),
        }
        if zeros:
            found["zero_term"] = scales(rows, columns // group, dtype="F32")
        if ordered:
            found["order"] = ("I64", RNG.permutation(columns).astype(np.int64))
        return found

    return make


def int8(group: int) -> Make:
    return lambda rows, columns: {
        "weight": ("I8", bytes_(rows, columns).view(np.int8)),
        "scale": scales(rows, columns // (group or columns)),
    }


BLOCK = Algorithm("FP8_BLOCK", "fp8", group_size=128, group_rows=128)
FORMS: dict[str, tuple[Algorithm, Make]] = {
    "fp8 blocks, BF16 scales": (BLOCK, blocks("BF16")),
    "fp8 blocks, F32 scales": (BLOCK, blocks("F32")),
    "fp8 rows, BF16 scales": (Algorithm("FP8", "fp8"), fp8(lambda rows, _: scales(rows, 1))),
    "fp8 rows, F32 scales": (Algorithm("FP8", "fp8"), fp8(lambda rows, _: scales(rows, dtype="F32"))),
    "fp8 whole, inputs too": (
        Algorithm("FP8", "fp8", activations=True, static=True),
        fp8(lambda *_: scales(dtype="F32"), input_scale=("F32", np.float32([0.01]))),
    ),
    "mxfp4": (Algorithm("MXFP4", "mxfp4", group_size=32), fp4(exponents)),
    "mxfp8": (Algorithm("MXFP8", "fp8", group_size=32), fp8(exponents)),
    "nvfp4, reciprocal": (
        Algorithm("NVFP4", "nvfp4", group_size=16, reciprocal=True),
        nvfp4(activations=False),
    ),
    "nvfp4, inputs too": (
        Algorithm("NVFP4", "nvfp4", True, True, group_size=16, reciprocal=True),
        nvfp4(activations=True),
    ),
    "nvfp4 of Model Optimizer": (
        Algorithm("NVFP4", "nvfp4", True, True, group_size=16),
        nvfp4(activations=True),
    ),
    "int4 in 128": (Algorithm("W4A16", "int4", group_size=128), int4(128, "BF16")),
    "int4 in 64": (Algorithm("W4A16", "int4", group_size=64), int4(64, "F32")),
    "int4 in 32": (Algorithm("W4A16", "int4", group_size=32), int4(32, "F16")),
    "int4, zero points": (Algorithm("W4A16", "int4", group_size=128), int4(128, "BF16", zeros=True)),
    "int4, ordered": (
        Algorithm("W4A16", "int4", group_size=128, ordered=True),
        int4(128, "BF16", ordered=True),
    ),
    "int8 in 128": (Algorithm("W8A16", "int8", group_size=128), int8(128)),
    "int8 in 32": (Algorithm("W8A16", "int8", group_size=32), int8(32)),
    "int8 rows": (Algorithm("W8A16", "int8"), int8(0)),
}


def write(form: tuple[Algorithm, Make], folder: Path, rows: int, columns: int) -> StoredLinear:
    """A layer [rows, columns] in a published form."""
    folder.mkdir()
    found = form[1](rows, columns)
    entries = [Entry(name, dtype, value.shape, [(name, value)]) for name, (dtype, value) in found.items()]
    (folder / "config.json").write_text("{}")
    write_shard(folder / "model.safetensors", entries)
    tensors = Checkpoint(folder).tensors
    names = ("weight", "scale", "global_scale", "input_scale", "zero_term", "order")
    given: dict[str, TensorInfo | None] = {name: tensors.get(name) for name in names}
    return StoredLinear(form[0], **given)


def graph(stored: StoredLinear, dtype: ir.DataType, columns: int, times: int = 1) -> GraphBuilder:
    """The layer, as often as asked: then names must not clash."""
    g = GraphBuilder("test", dtype=dtype)
    x = g.input("x", dtype, ["R", columns])
    for i in range(times):
        x = TensorRT(dtype).quantized_linear(
            g, x, QuantizedLinear(name=f"layer{i}", stored=stored, folder=".")
        )
    g.output(x, "y", dtype, ["R", stored.weight.shape[0]])
    return g


def saved(g: GraphBuilder, folder: Path) -> Path:
    model = g.model()
    model.graph.opset_imports["trt"] = 1
    ir.save(model, folder / "graph.onnx")
    return folder / "graph.onnx"


def plan_of(g: GraphBuilder, folder: Path, capability: int) -> dict[str, Any]:
    """What is known of the plan of a graph, and its `size` in bytes."""
    file, profile = saved(g, folder), Profile("all", {"R": (1, 8, 64)})
    made = build_plan(FLAVOURS["tensorrt-rtx"], file, folder / "layer.plan", [profile], capability, silent)
    return {**made, "size": (folder / "layer.plan").stat().st_size}


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_has_the_bytes_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    """At most 5% more, beside kernels: those of a narrow layer weigh as much as its weights."""
    # SM89 has no arithmetic in four bits.
    capability, dtype = (120, "FLOAT16") if form.startswith(("nvfp4", "mxfp4", "int8")) else (89, "BFLOAT16")
    stored = write(FORMS[form], tmp_path / "layer", 2048, 2048)
    size = sum(info.nbytes for info in stored.tensors)
    made = plan_of(graph(stored, ir.DataType[dtype], 2048, times=2), tmp_path / "layer", capability)
    assert stored.weight.nbytes <= made["size"] < 1.05 * size + KERNELS


def experts(folder: Path, scheme: str, width: int, layers: int = 1) -> tuple[Path, list[ExpertLayer]]:
    """Layers of random experts in a scheme, and where they are stored."""
    names = [
        {p: [f"layers.{i}.mlp.experts.{e}.{p}_proj" for e in range(COUNT)] for p in PROJECTIONS}
        for i in range(layers)
    ]
    entries = []
    for name in (name for of_layer in names for stack in of_layer.values() for name in stack):
        w = RNG.standard_normal((width, width)).astype(np.float32)
        entries.append(Entry(f"{name}.weight", "F32", w.shape, [(f"{name}.weight", w)]))
    (folder / "source").mkdir()
    (folder / "source" / "config.json").write_text("{}")
    write_shard(folder / "source" / "model.safetensors", entries)
    checkpoint = Checkpoint(quantize(folder / "source", folder / "quantized", scheme))
    if scheme == "int4":
        checkpoint = int4_by_row(checkpoint, folder / "by-row", silent)
    made = []
    for of_layer in names:
        stacks: dict[Projection, Stack] = {}
        for projection, stack in of_layer.items():
            stored = stored_experts(checkpoint, stack, width, width)
            stacks[projection] = Stack(width, width, tuple(stored or ()))
        made.append(ExpertLayer(stacks=stacks, folder=".", k=2, widened_bytes=0))
    return checkpoint.directory, made


def experts_graph(layers: list[ExpertLayer], dtype: ir.DataType, width: int) -> GraphBuilder:
    dialect = TensorRT(dtype)
    g = GraphBuilder("test", dtype=dtype)
    x, router = g.input("x", dtype, ["R", width]), g.input("router", FLOAT, ["R", COUNT])
    for i, layer in enumerate(layers):
        with g.scope(f"layers.{i}"):
            x = dialect.quantized_experts(g, x, router, layer)
    g.output(x, "y", dtype, ["R", width])
    return g


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
    folder, layers = experts(tmp_path, scheme, WIDTH)
    size = plan_of(experts_graph(layers, ir.DataType[dtype], WIDTH), folder, capability)["size"]
    weights = 3 * COUNT * WIDTH * WIDTH
    packed = PACKED[scheme] * weights
    assert packed <= size < packed + 4 * KERNELS < 2 * weights


def test_scratch_memory_holds_what_one_product_widens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what all do, of a layer or of several."""
    width, layers = 512, 2
    folder, of_layers = experts(tmp_path, "mxfp4", width, layers)
    matrix = 2 * width * width  # bytes in BF16

    def scratch(count: int) -> int:
        g = experts_graph(of_layers[:count], ir.DataType.BFLOAT16, width)
        return int(plan_of(g, folder, 120)["activation_bytes"])

    at_once = scratch(1)
    monkeypatch.setattr(tensorrt, "WIDENED_BYTES", 0)
    two, of_all_layers = scratch(1), scratch(layers)
    assert two < at_once - 2 * matrix
    assert of_all_layers - two < matrix


@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (64, 256), (256, 64)])
def test_a_layer_of_one_block_is_built(tmp_path: Path, rows: int, columns: int) -> None:
    """The parser refuses blocks where there is only one of them."""
    stored = write((BLOCK, blocks("BF16")), tmp_path / "layer", rows, columns)
    assert plan_of(graph(stored, ir.DataType.BFLOAT16, columns), tmp_path / "layer", 89)["size"]


def test_a_block_of_exponents_is_a_power_of_two(tmp_path: Path) -> None:
    """Scales in one byte, as DeepSeek's later checkpoints have them. Rows and columns end within a block."""
    exponents = np.array([[120, 121, 119], [122, 127, 118]], np.uint8)
    form = fp8(lambda *_: ("U8", exponents))
    stored = write((BLOCK, form), tmp_path / "layer", 192, 320)
    file = saved(graph(stored, FLOAT, 320), tmp_path / "layer")
    session = ort.InferenceSession(executable(onnx.load(file)).SerializeToString())
    (found,) = session.run(None, {"x": np.eye(320, dtype=np.float32)})
    codes = Checkpoint(tmp_path / "layer").array("weight").astype(np.float32)
    factors = np.repeat(np.repeat(E8M0[exponents], 128, 0), 128, 1)[:192, :320]
    np.testing.assert_array_equal(found.T, codes * factors)


@pytest.mark.parametrize(
    ("precision", "capability", "message"),
    [
        ("target=nvfp4", 89, "89: has no NVFP4 arithmetic"),
        ("head=mxfp4", 86, "86: has no MXFP4 arithmetic"),
        ("drafter=fp8", 80, r"80: has no FP8 arithmetic.*--precision \w+=int4"),
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


def test_downloaded_checkpoints_become_plans(
    pair: tuple[Path, Path], moe: tuple[Path, Path], tmp_path: Path
) -> None:
    """As other programs write them, from their configurations to plans with their numbers."""
    options = TensorRTOptions((120,), max_batch_size=1, prefill_chunk=32)
    for name, (target, drafter), dtypes in (
        ("mixed", pair, {"FLOAT8E4M3FN", "FLOAT4E2M1"}),
        ("AWQ", moe, {"INT4"}),
    ):
        written(name, target, tmp_path / name)
        sources = str(tmp_path / name), str(drafter)
        bundle = build(
            *sources, tmp_path / f"{name} built", engine="tensorrt-rtx", max_seq_len=64, options=options
        )
        assert dtypes <= {*bundle.manifest["tensorrt"]["plans"]["120"]["target"]["weight_bytes"]}
