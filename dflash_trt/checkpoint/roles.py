"""What a tensor is for, by its name, and how many numbers it has."""

from __future__ import annotations

import math

from dflash_trt.checkpoint.rules import Quantization
from dflash_trt.checkpoint.tensors import TensorInfo
from dflash_trt.formats.base import BLOCK

_ROLES = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".experts.", "experts"),
    ("shared_expert_gate", "router"),
    ("router", "router"),
    ("mlp.gate.", "router"),
    ("self_attn", "attention"),
    ("linear_attn", "attention"),
    (".mlp.", "mlp"),
    ("norm", "norm"),
    ("fc.", "fc"),
)


def role_of(name: str) -> str:
    """embedding, head, experts, router, attention, mlp, norm, fc (the drafter's fusion of taps) or other."""
    return next((role for part, role in _ROLES if part in name), "other")


# The ends of names of tensors that say how to read a weight.
_SCALES = (
    *("_scale", "_scale_2", "_scales", ".scales", ".weight_scale_inv"),
    *(".weight_zero_point", ".weight_zero_term", ".qzeros", ".weight_g_idx", ".g_idx", ".weight_order"),
    ".weight_shape",
)


def parameters_of(tensor: TensorInfo, quantization: Quantization | None = None) -> int:
    """Numbers in a tensor: two in a byte of MXFP4's blocks and of packed weights, none in their scales.

    Layers in the blocks that ONNX Runtime multiplies have BLOCK numbers in each. `quantization` says how many bits the
    integers in words have; without it they have four.
    """
    if tensor.name.endswith(_SCALES) and not tensor.name.endswith("router.per_expert_scale"):
        return 0
    if tensor.dtype == "I32":
        algorithm = None if quantization is None else quantization.algorithm(tensor.name.rpartition(".")[0])
        return tensor.nbytes * (1 if algorithm is not None and algorithm.scheme == "int8" else 2)
    in_bytes = tensor.dtype == "U8" and tensor.name.endswith((".weight", ".weight_packed"))
    if in_bytes and len(tensor.shape) == 3:
        return math.prod(tensor.shape[:2]) * BLOCK
    return math.prod(tensor.shape) * (2 if in_bytes or tensor.name.endswith("_blocks") else 1)
