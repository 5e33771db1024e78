"""Bundles for the CPU in eight and four bits: which nodes they have, and that drafts do not change their tokens."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from dflash_trt import LLM
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.engines.onnxruntime import products
from dflash_trt.engines.onnxruntime.runner import OnnxRuntimeRunner
from dflash_trt.errors import BundleError
from dflash_trt.formats.precision import parse_precision
from dflash_trt.reports.inspection import inspect

LAYERS, LINEARS = 10, 4  # of tiny; products of a layer: q/k/v, o, gate/up, down


BY_OUTPUT = "int8 by output"


@pytest.fixture(scope="module", params=["int8", "int4", BY_OUTPUT])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    scheme = request.param.partition(" ")[0]
    out = tmp_path_factory.mktemp("cpu") / scheme
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "channels_pay", lambda: request.param == BY_OUTPUT)
        return build("tiny", None, out, precision=parse_precision(f"target={scheme},drafter=int8,head=int4"))


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(path).graph)


def test_every_product_is_one_of_integers(bundle: Bundle) -> None:
    found = operators(bundle.path / "target.onnx")
    by_output = bundle.manifest["exact_bytes"]
    product = "MatMulIntegerToFloat" if by_output else "MatMulNBits"
    assert found[product] == LAYERS * LINEARS + 1
    assert found["Gemm"] == 0
    assert found["MatMul"] == by_output * found[product]  # the sum of both bytes
    drafter = operators(bundle.path / "drafter.onnx")
    assert drafter["MatMulNBits"]  # the head is in four bits
    assert bool(drafter["MatMulIntegerToFloat"]) == by_output
    assert drafter["Gemm"] == 0


def test_the_head_has_fewer_bits_beside_a_tied_embedding(bundle: Bundle, tmp_path: Path) -> None:
    by_dtype = bundle.manifest["target"]["weight_bytes"]
    assert set(by_dtype["head"]) == {"I8" if bundle.manifest["exact_bytes"] else "U8", "F32"}
    assert set(by_dtype["embedding"]) == {"BF16"}
    plain = build("tiny", None, tmp_path / "plain").manifest
    head = 192 * 2048
    assert bundle.manifest["target"]["parameters"] == plain["target"]["parameters"] + head
    assert bundle.manifest["quantization"]["head"] == "W4A16_AWQ"


def test_small_passes_give_back_what_a_large_one_took(bundle: Bundle) -> None:
    engine = OnnxRuntimeRunner(bundle.path / "target.onnx", slots=4, capacity=128)

    def run(batch: int, rows: int) -> np.ndarray:
        places = np.tile(np.arange(rows), (batch, 1))
        feeds = {"tokens": places + 3, "start": np.zeros(batch, int), "rows": places}
        return np.array(engine.run(feeds)["logits"])

    large = run(4, 64)
    most = engine.held_bytes
    assert most >= large.nbytes
    first = run(1, 2)
    for _ in range(40):
        run(1, 8)
        np.testing.assert_array_equal(run(1, 2), first)
    assert engine.held_bytes < most / 16
    np.testing.assert_array_equal(run(4, 64), large)
    engine.close()


def test_a_processor_that_rounds_by_the_number_of_rows_is_refused(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bundle.manifest["exact_bytes"]:
        monkeypatch.setattr(products, "bytes_are_exact", lambda: False)
        refused = "INT8 layers with one scale for each output"
    else:
        (used,) = bundle.manifest["integer_bits"]
        monkeypatch.setattr(products, "fewest_rows", lambda bits: None if bits == used else 1)
        refused = f"layers of {used}-bit integers"
    with pytest.raises(BundleError, match=f"{refused}.* build the bundle on this machine"):
        LLM(bundle.path)
    LLM(build("tiny", None, tmp_path / "floats").path).close()


def test_weights_of_four_bits_take_eight_where_no_padding_makes_rows_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = parse_precision("target=int4,drafter=int4,head=int4")
    described = []
    for least in (2, None):
        monkeypatch.setattr(products, "fewest_rows", lambda bits, least=least: least)
        made = build("tiny", None, tmp_path / str(least), precision=precision)
        assert made.manifest["integer_bits"] == [4 if least else 8]
        assert bits(made.path / "target.onnx") == {4 if least else 8}
        assert bits(made.path / "drafter.onnx") == {4}
        assert inspect(made.path)["fewest_rows"] == {4 if least else 8: least}
        assert main(["inspect", str(made.path)]) == 0
        assert re.search(
            rf"^fewest rows +{4 if least else 8} +{least or 'unknown'}$", capsys.readouterr().out, re.M
        )
        described.append(made.manifest["target"])
    four, eight = described
    assert eight["parameters"] == four["parameters"]
    assert eight["weight_bytes"]["head"]["U8"] == 2 * four["weight_bytes"]["head"]["U8"]


def bits(path: Path) -> set[int]:
    return {node.attributes["bits"].as_int() for node in ir.load(path).graph if node.op_type == "MatMulNBits"}
