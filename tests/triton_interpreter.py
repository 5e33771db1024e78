"""Triton's interpreter, in which conftest.py has kernels run, put right; and tensors as arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


def _round_to_bfloat16(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """The interpreter cuts float32 off to bfloat16; the instruction on a GPU rounds to nearest, ties to even."""
    if source == tl.float32 and target == tl.bfloat16:
        return data.astype(ml_dtypes.bfloat16).view(np.uint16)
    return _convert_float(data, source, target, mode)


interpreter._convert_float = _round_to_bfloat16


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as an array, bfloat16 as ml_dtypes has it."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()
