"""Corrections of Triton's interpreter, in which conftest.py runs kernels, and tensors as arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

from dflash_trt.formats.mxfp4 import BLOCK, unpack_blocks

_convert_float = interpreter._convert_float


def _round_to_bfloat16(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """The interpreter truncates float32 to bfloat16. The instruction on a GPU rounds to nearest, ties to even."""
    if source == tl.float32 and target == tl.bfloat16:
        return data.astype(ml_dtypes.bfloat16).view(np.uint16)
    return _convert_float(data, source, target, mode)


interpreter._convert_float = _round_to_bfloat16

_create_dot = interpreter.InterpreterBuilder.create_dot


def _create_bfloat16_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits, and would multiply these."""
    if a.dtype == tl.bfloat16:
        a, b = (
            interpreter.TensorHandle(each.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)
            for each in (a, b)
        )
    return _create_dot(self, a, b, *rest)


interpreter.InterpreterBuilder.create_dot = _create_bfloat16_dot


def _create_dot_scaled(
    self: Any, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, *rest: Any
) -> Any:
    """MXFP4 weights [M, K/2] times BF16 or FP16 columns [K, N], summed in float32."""
    assert lhs_format.name == "E2M1"
    assert rhs_scale is None
    groups = lhs.data.reshape(len(lhs.data), -1, BLOCK // 2)
    columns = rhs.data.view(ml_dtypes.bfloat16) if rhs.data.dtype == np.uint16 else rhs.data
    product = unpack_blocks(groups, lhs_scale.data) @ columns.astype(np.float32)
    return interpreter.TensorHandle(product + rest[-1].data, tl.float32)


if not hasattr(
    interpreter.InterpreterBuilder, "create_dot_scaled"
):  # Triton 3.7, which comes with torch 2.13 for CUDA
    interpreter.InterpreterBuilder.create_dot_scaled = _create_dot_scaled


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as an array. bfloat16 becomes ml_dtypes' type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
