"""Layers of integers on ONNX Runtime, in blocks or with one scale for each output: the same numbers as on disk, and
rows that depend on no other row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_trt import hardware
from dflash_trt.bundle.workspace import silent
from dflash_trt.checkpoint import gguf_blocks
from dflash_trt.checkpoint.linears import stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint, parameters_of
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.onnxruntime.products import bytes_are_exact, channels_pay, fewest_rows
from dflash_trt.formats import FORMATS
from dflash_trt.formats.base import BLOCK
from dflash_trt.formats.integers import INT8, PER_CHANNEL
from dflash_trt.formats.numbers import unpack_pairs
from dflash_trt.graph.builder import FLOAT, GraphBuilder
from dflash_trt.graph.onnxruntime import OnnxRuntime
from dflash_trt.graph.quantized import QuantizedLinear
from dflash_trt.hardware import has_amx_int8
from dflash_trt.quantization.repack import in_blocks, int4_by_row
from tests.doubles import sessions
from tests.doubles.checkpoints import write_json
from tests.doubles.formats import widen
from tests.doubles.quantized_checkpoints import encoded, write_quant_config, write_safetensors

IN, OUT = 192, 80
ALGORITHMS = ["W8A16", "W4A16_AWQ"]
CHANNELS = PER_CHANNEL.name
GGUF = ["Q4_0", "Q4_1", "Q8_0"]  # what the library `gguf` writes of the types that are read as stored


exact_bytes = pytest.mark.skipif(
    not bytes_are_exact(), reason="this processor's sums of products of bytes saturate"
)


def write(folder: Path, algorithm: str, *, extras: bool = False) -> Checkpoint:
    random = np.random.default_rng(0)
    w = random.standard_t(3, (OUT, IN)).astype(np.float32)
    w[7] = 0
    found: dict[str, Any]
    if algorithm == CHANNELS:
        w[8] = np.abs(w[8]).max()  # with the largest input, sums that saturate in 16 bits
        codes, scales = INT8().encode(PER_CHANNEL, w, np.float32([1])).values()
        found = {"l.weight": codes, "l.weight_scale": scales}
    elif algorithm in GGUF:
        data = gguf.quantize(w + 0.1, gguf.GGMLQuantizationType[algorithm])
        found = {f"l.{end}": array for end, array in gguf_blocks.pieces(algorithm, data).items()}
    else:
        found = encoded("l", algorithm, w)
    if extras:
        smooth, bias = random.uniform(0.5, 2, IN), random.standard_normal(OUT)
        found |= {"l.pre_quant_scale": smooth.astype(np.float32), "l.bias": bias.astype(np.float32)}
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", found)
    if algorithm in GGUF:
        section = {"quant_method": "gguf", "layers": {"l": algorithm}}
        write_json(folder / "config.json", {"quantization_config": section})
        return Checkpoint(folder)
    write_quant_config(folder, algorithm)
    return Checkpoint(folder)


def session(checkpoint: Checkpoint, *, biased: bool = False, threads: int = 1) -> ort.InferenceSession:
    stored = stored_linear(checkpoint, "l", IN, OUT)
    assert stored is not None
    assert stored.layout == "blocks" or stored.per_channel
    g = GraphBuilder("test")
    x = g.input("x", FLOAT, ["rows", IN])
    bias = g.raw_weight(checkpoint["l.bias"], ".") if biased else None
    y = OnnxRuntime().quantized_linear(
        g, x, QuantizedLinear(name="linear", stored=stored, folder=".", bias=bias)
    )
    g.output(y, "y", FLOAT, ["rows", OUT])
    path = checkpoint.directory / "model.onnx"
    ir.save(g.model(), path)
    return sessions.session(path, intra_op_num_threads=threads)


def as_blocks(original: Checkpoint, out: Path, *, eight_bits: bool = False) -> Checkpoint:
    """Those of GGUF's four bits and eight are blocks already."""
    return in_blocks(original, out, silent, eight_bits=eight_bits)


def numbers(checkpoint: Checkpoint) -> np.ndarray:
    """The numbers that the blocks stand for, by the definition of MatMulNBits."""
    codes, scales = checkpoint.array("l.weight"), checkpoint.array("l.weight_scale")
    bits = codes.shape[2] * 8 // BLOCK
    unsigned = codes if bits == 8 else unpack_pairs(codes)
    scales = np.repeat(scales, IN // BLOCK // scales.shape[1], axis=1)
    found: np.ndarray = (unsigned.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]
    if "l.weight_zero_term" in checkpoint.tensors:
        found += checkpoint.array("l.weight_zero_term")[..., None]
    return found.reshape(OUT, IN)


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_blocks_are_the_same_numbers(tmp_path: Path, algorithm: str, eight_bits: bool) -> None:
    original = write(tmp_path / "l", algorithm)
    stored = stored_linear(original, "l", IN, OUT)
    assert stored is not None
    found = in_blocks(original, tmp_path / "blocks", silent, eight_bits=eight_bits)
    assert found is not original
    bits = 8 if eight_bits else FORMATS[stored.format.name].integer_bits
    assert found["l.weight"].shape[2] * 8 == BLOCK * (bits or 0)
    np.testing.assert_array_equal(numbers(found), widen(original, stored))
    assert parameters_of(found["l.weight"]) == parameters_of(original["l.weight"]) == OUT * IN
    if algorithm == "W4A16_AWQ":
        by_row = int4_by_row(original, tmp_path / "by-row", silent)
        again = in_blocks(by_row, tmp_path / "again", silent, eight_bits=eight_bits)
        np.testing.assert_array_equal(again.array("l.weight"), found.array("l.weight"))
        np.testing.assert_array_equal(again.array("l.weight_scale"), found.array("l.weight_scale"))


@pytest.mark.parametrize("kind", GGUF)
def test_blocks_of_gguf_are_its_numbers(tmp_path: Path, kind: str) -> None:
    original = write(tmp_path / "l", kind)
    stored = stored_linear(original, "l", IN, OUT)
    assert stored is not None
    w = np.random.default_rng(0).standard_t(3, (OUT, IN)).astype(np.float32)
    w[7] = 0
    data = gguf.quantize(w + 0.1, gguf.GGMLQuantizationType[kind])
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    wide = as_blocks(original, tmp_path / "wide", eight_bits=True)
    by_row = int4_by_row(original, tmp_path / "by-row", silent)
    signed = stored_linear(by_row, "l", IN, OUT)
    assert signed is not None
    assert wide["l.weight"].shape[2] == BLOCK
    for found in (widen(original, stored), numbers(original), numbers(wide), widen(by_row, signed)):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("algorithm", ALGORITHMS + GGUF)
def test_product_is_that_of_inputs_in_eight_bits(tmp_path: Path, algorithm: str) -> None:
    original = write(tmp_path / "l", algorithm, extras=True)
    stored = stored_linear(original, "l", IN, OUT)
    assert stored is not None
    random = np.random.default_rng(1)
    x = random.standard_t(3, (5, IN)).astype(np.float32)
    x[3] = 0
    found = as_blocks(original, tmp_path / "blocks")
    y = np.asarray(session(found, biased=True).run(None, {"x": x})[0])
    smoothed = (x * original.array("l.pre_quant_scale")).reshape(5, -1, BLOCK)
    scale = np.maximum(np.abs(smoothed).max(axis=-1, keepdims=True) / 127, 1e-30)
    rounded = (np.rint(smoothed / scale) * scale).reshape(5, IN).astype(np.float64)
    weights, bias = widen(original, stored).astype(np.float64), original.array("l.bias")
    if algorithm == "Q4_1":  # what is added for a block is multiplied by the inputs as they are
        term = np.repeat(original.array("l.weight_zero_term").astype(np.float64), BLOCK, axis=1)
        exact = rounded @ (weights - term).T + smoothed.reshape(5, IN).astype(np.float64) @ term.T + bias
    else:
        exact = rounded @ weights.T + bias
    # A number half-way between two integers may go either way.
    np.testing.assert_allclose(y, exact, atol=2e-2 * np.abs(exact).max())
    assert np.linalg.norm(y - exact) < 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *GGUF, pytest.param(CHANNELS, marks=exact_bytes)])
def test_a_row_does_not_depend_on_other_rows(tmp_path: Path, algorithm: str, threads: int) -> None:
    """Bit for bit: drafting must not change the tokens."""
    original = write(tmp_path / "l", algorithm)
    found = original if algorithm == CHANNELS else as_blocks(original, tmp_path / "blocks")
    run = session(found, threads=threads)
    x = np.random.default_rng(1).standard_t(3, (64, IN)).astype(np.float32)
    whole = run.run(None, {"x": x})[0]
    least = fewest_rows(4 if found.tensors["l.weight"].shape[-1] == BLOCK // 2 else 8)
    assert least is not None
    for rows in (least, 2, 3, 4, 7, 8, 9, 16, 17, 33):
        for first in range(0, 64 - rows, 7):
            part = slice(first, first + rows)
            np.testing.assert_array_equal(run.run(None, {"x": x[part]})[0], whole[part])


def test_the_probe_finds_what_a_layer_of_four_bits_does(tmp_path: Path) -> None:
    found = in_blocks(write(tmp_path / "l", "W4A16_AWQ"), tmp_path / "blocks", silent)
    run = session(found)
    x = np.random.default_rng(2).standard_normal((2, IN)).astype(np.float32)
    same = np.array_equal(run.run(None, {"x": x})[0][:1], run.run(None, {"x": x[:1]})[0])
    assert fewest_rows(4) == (1 if same else 2)
    assert fewest_rows(8) == 1


@exact_bytes
def test_inputs_have_sixteen_bits(tmp_path: Path) -> None:
    """Eight would leave an error of a hundredth."""
    checkpoint = write(tmp_path / "l", CHANNELS, extras=True)
    stored = stored_linear(checkpoint, "l", IN, OUT)
    assert stored is not None
    x = np.random.default_rng(1).standard_t(3, (6, IN)).astype(np.float32)
    x[2], x[3], x[4] = 1e-20 * x[2], 0, 3
    y = np.asarray(session(checkpoint, biased=True).run(None, {"x": x})[0])
    smoothed = x.astype(np.float64) * checkpoint.array("l.pre_quant_scale")
    product = smoothed @ widen(checkpoint, stored).astype(np.float64).T
    bias = checkpoint.array("l.bias")
    norms = np.linalg.norm(product, axis=1)
    assert (np.linalg.norm(y - product - bias, axis=1) <= 3e-4 * norms + 1e-5).all()


def test_blocks_of_channels_are_the_same_numbers(tmp_path: Path) -> None:
    original = write(tmp_path / "l", CHANNELS)
    assert in_blocks(original, tmp_path / "as-it-is", silent, channels=True) is original
    found = in_blocks(original, tmp_path / "blocks", silent)
    before, after = stored_linear(original, "l", IN, OUT), stored_linear(found, "l", IN, OUT)
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(widen(original, before), widen(found, after))


def test_channels_are_for_processors_with_amx_whose_sums_are_exact(
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
