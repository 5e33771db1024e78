"""What ONNX Runtime's products of integers do on this processor.

Drafting must not change the tokens, so a row must have the same bits in every pass. The kernels differ between
processors: those of AVX2 round the product of four bits otherwise for one row than for several, and add products of
unsigned and signed bytes in pairs that saturate at 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from dflash_trt import hardware
from dflash_trt.formats.base import BLOCK
from dflash_trt.graph import INTEGERS, MICROSOFT_DOMAIN

_IN, _OUT = 6 * BLOCK, 80
_ROWS = (1, 2, 3, 4, 5, 8, 16)


@cache
def fewest_rows(bits: int) -> int | None:
    """From how many rows on a product with weights of 4 or 8 bits gives a row the same bits, with zero points in the
    middle and anywhere else: 1, or 2 on AVX2. None: it depends on their number above 2 too.
    """
    agreeing = set(_ROWS)
    for points in (False, True):
        agreeing &= _agreeing(bits, points=points)
    return next((least for least in (1, 2) if agreeing >= {n for n in _ROWS if n >= least}), None)


@cache
def bytes_are_exact() -> bool:
    """Whether products of unsigned bytes with signed ones have exact sums, whatever the number of rows."""
    random = np.random.default_rng(0)
    weight = random.integers(-127, 128, (_IN, _OUT)).astype(np.int8)
    weight[:, 0] = 127
    x = random.integers(0, 256, (max(_ROWS), _IN)).astype(np.uint8)
    x[0] = 255
    constants = {"weight": weight, "one": np.float32(1), "zero": np.uint8(128)}
    node = helper.make_node(
        "MatMulIntegerToFloat",
        ["x", "weight", "one", "one", "zero"],
        ["y"],
        domain=MICROSOFT_DOMAIN,
    )
    session = _session(node, constants, TensorProto.UINT8)
    exact = (x.astype(np.int32) - 128) @ weight.astype(np.int32)
    return all(np.array_equal(session.run(None, {"x": x[:n]})[0], exact[:n]) for n in _ROWS)


def channels_pay() -> bool:
    """Whether INT8 layers with one scale for each output, whose inputs take two bytes (graph/quantized.py), are faster
    than blocks: on AMX, which multiplies bytes and not blocks. With VNNI alone they lose in passes of one or two rows.
    """
    return hardware.has_amx_int8() and bytes_are_exact()


def _agreeing(bits: int, *, points: bool) -> set[int]:
    """The numbers of rows whose product has the bits of the largest one, wherever the rows lie in that."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (_OUT, _IN // BLOCK, BLOCK * bits // 8), dtype=np.uint8)
    scales = random.uniform(0.5, 1.5, (_OUT, _IN // BLOCK)).astype(np.float32)
    constants: dict[str, np.ndarray] = {"codes": codes, "scales": scales}
    if points:
        size = (_OUT, _IN // BLOCK * bits // 8)
        constants["points"] = random.integers(0, 256, size, dtype=np.uint8)
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales", *(["points"] * points)],
        ["y"],
        domain=MICROSOFT_DOMAIN,
        K=_IN,
        N=_OUT,
        bits=bits,
        block_size=BLOCK,
        accuracy_level=INTEGERS,
    )
    session = _session(node, constants, TensorProto.FLOAT)
    x = random.standard_normal((max(_ROWS), _IN)).astype(np.float32)
    whole = session.run(None, {"x": x})[0]

    def same(first: int, rows: int) -> bool:
        part = slice(first, first + rows)
        return np.array_equal(session.run(None, {"x": x[part]})[0], whole[part])

    return {rows for rows in _ROWS if all(same(first, rows) for first in range(len(x) - rows + 1))}


def _session(node: NodeProto, constants: Mapping[str, Any], dtype: int) -> ort.InferenceSession:
    """A session of one product, x [rows, _IN] -> y [rows, _OUT], on one thread."""
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", dtype, ["rows", _IN])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", _OUT])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
