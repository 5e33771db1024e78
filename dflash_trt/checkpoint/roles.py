"""What a tensor is for, by its name: the same words for every family and for drafters."""

from __future__ import annotations

import math

from dflash_trt.checkpoint.tensors import TensorInfo

_ROLES = (
    ("embed_tokens", "embedding"),
    ("lm_head", "head"),
    (".experts.", "experts"),
    ("router", "router"),
    ("mlp.gate.", "router"),
    ("self_attn", "attention"),
    (".mlp.", "mlp"),
    ("norm", "norm"),
    ("fc.", "fc"),
)


def role_of(name: str) -> str:
    """embedding, head, experts, router, attention, mlp, norm, fc (the drafter's fusion of taps) or other."""
    return next((role for part, role in _ROLES if part in name), "other")


def parameters_of(tensor: TensorInfo) -> int:
    """Numbers in a tensor: two in a byte of MXFP4 blocks, none in their scales."""
    if tensor.name.endswith("_scales"):
        return 0
    return math.prod(tensor.shape) * (2 if tensor.name.endswith("_blocks") else 1)
