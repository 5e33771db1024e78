"""INT8 layers with one scale for each output on ONNX Runtime: inputs in two bytes, and rows that depend on no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_trt import hardware
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.widening import widen
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.onnxruntime.products import bytes_are_exact, channels_pay
from dflash_trt.formats.int8 import PER_CHANNEL, quantize_int8
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.quantized import QuantizedLinear
from dflash_trt.hardware import has_amx_int8
from dflash_trt.quantization.repack import has_blocks, in_blocks
from tests.doubles import sessions
from tests.doubles.quantized_checkpoints import write_quant_config, write_safetensors

IN, OUT = 192, 80
exact_bytes = pytest.mark.skipif(
    not bytes_are_exact(), reason="this processor's sums of products of bytes saturate"
)


def write(folder: Path) -> Checkpoint:
    random = np.random.default_rng(0)
    w = random.standard_t(3, (OUT, IN)).astype(np.float32)
    w[7] = 0
    w[8] = np.abs(w[8]).max()  # with the largest input, sums that saturate in 16 bits
    codes, scales = quantize_int8(w, IN)
    smooth, bias = random.uniform(0.5, 2, IN), random.standard_normal(OUT)
    layer = {"l.weight": codes, "l.weight_scale": scales}
    extras = {"l.pre_quant_scale": smooth.astype(np.float32), "l.bias": bias.astype(np.float32)}
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", layer | extras)
    write_quant_config(folder, PER_CHANNEL.name)
    return Checkpoint(folder)


def session(checkpoint: Checkpoint, threads: int = 1) -> ort.InferenceSession:
    stored = stored_linear(checkpoint, "l", IN, OUT)
    assert stored is not None
    assert stored.per_channel
    g = GraphBuilder("test")
    x, bias = g.input("x", FLOAT, ["rows", IN]), g.raw_weight(checkpoint["l.bias"], ".")
    y = OnnxRuntime().quantized_linear(
        g, x, QuantizedLinear(name="linear", stored=stored, folder=".", bias=bias)
    )
    g.output(y, "y", FLOAT, ["rows", OUT])
    path = checkpoint.directory / "model.onnx"
    ir.save(g.model(), path)
    return sessions.session(path, intra_op_num_threads=threads)


@exact_bytes
def test_inputs_have_sixteen_bits(tmp_path: Path) -> None:
    """Eight would leave an error of a hundredth."""
    checkpoint = write(tmp_path / "l")
    stored = stored_linear(checkpoint, "l", IN, OUT)
    assert stored is not None
    x = np.random.default_rng(1).standard_t(3, (6, IN)).astype(np.float32)
    x[2], x[3], x[4] = 1e-20 * x[2], 0, 3
    y = np.asarray(session(checkpoint).run(None, {"x": x})[0])
    smoothed = x.astype(np.float64) * checkpoint.array("l.pre_quant_scale")
    product = smoothed @ widen(checkpoint, stored).astype(np.float64).T
    bias = checkpoint.array("l.bias")
    norms = np.linalg.norm(product, axis=1)
    assert (np.linalg.norm(y - product - bias, axis=1) <= 3e-4 * norms + 1e-5).all()


@exact_bytes
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_other_rows(tmp_path: Path, threads: int) -> None:
    """Bit for bit, on any number of threads."""
    checkpoint = write(tmp_path / "l")
    one, run = session(checkpoint), session(checkpoint, threads)
    x = np.random.default_rng(1).standard_t(3, (64, IN)).astype(np.float32)
    alone = np.concatenate([one.run(None, {"x": row[None]})[0] for row in x])
    for rows in (2, 3, 4, 7, 8, 9, 16, 17, 33, 64):
        np.testing.assert_array_equal(run.run(None, {"x": x[:rows]})[0], alone[:rows])


def test_layers_in_blocks_are_the_same_numbers(tmp_path: Path) -> None:
    original = write(tmp_path / "l")
    assert has_blocks(original)
    assert not has_blocks(original, channels=True)
    found = Checkpoint(in_blocks(original, tmp_path / "blocks", silent))
    before, after = stored_linear(original, "l", IN, OUT), stored_linear(found, "l", IN, OUT)
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(widen(original, before), widen(found, after))


def test_they_are_for_processors_with_amx_whose_sums_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "Path", lambda path: info)
    for flags, expected, names in (
        ("avx2 avx512f avx512_vnni amx_tile", False, "AVX-512, VNNI"),
        ("avx2 avx512f avx512_vnni amx_int8", True, "AVX-512, VNNI, AMX"),
        ("avx2 avx_vnni", False, "AVX2, VNNI"),
        ("avx2 fma", False, "AVX2"),
        ("neon", False, None),
    ):
        info.write_text(f"model name\t: x\nflags\t\t: fpu {flags}\n")
        assert has_amx_int8() == expected
        assert hardware.instructions() == names
    info.unlink()
    assert not has_amx_int8()
    assert hardware.instructions() is None
    for amx in (False, True):
        for exact in (False, True):
            monkeypatch.setattr(hardware, "has_amx_int8", lambda amx=amx: amx)
            monkeypatch.setattr(products, "bytes_are_exact", lambda exact=exact: exact)
            assert channels_pay() == (amx and exact)
