"""Checkpoints in the layouts of GPTQ and AutoAWQ, written from the descriptions of these layouts, bit by bit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

GROUP = 64
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight outputs each nibble holds


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[a, b] codes -> [a, b * bits / 32] int32, the first in the lowest bits."""
    per_word = 32 // bits
    parts = codes.astype(np.uint32).reshape(len(codes), -1, per_word)
    words = np.zeros(parts.shape[:2], np.uint32)
    for place, source in enumerate(order or range(per_word)):
        words |= parts[..., source] << np.uint32(bits * place)
    return words.view(np.int32)


def layer(
    weight: np.ndarray, method: str, bits: int, *, symmetric: bool, ordered: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a layer [out, in], and the numbers that they stand for."""
    rows, columns = weight.shape
    groups = columns // GROUP
    index = np.arange(columns) // GROUP
    if ordered:
        index = np.random.default_rng(rows + columns).permutation(index)
    sorted_columns = np.argsort(index, kind="stable")
    parts = weight[:, sorted_columns].reshape(rows, groups, GROUP)
    top = (1 << bits) - 1
    if symmetric:
        scale = np.maximum(np.abs(parts).max(-1) / (1 << (bits - 1)), 1e-6).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        scale = np.maximum((parts.max(-1) - parts.min(-1)) / top, 1e-6).astype(np.float16)
        zero = np.clip(np.rint(-parts.min(-1) / scale.astype(np.float32)), 1, top).astype(int)
    by_column, zero_by_column = scale.astype(np.float32)[:, index], zero[:, index]
    codes = np.clip(np.rint(weight / by_column) + zero_by_column, 0, top).astype(np.uint8)
    stored_zero = zero - (method == "gptq")
    found = {"scales": np.ascontiguousarray(scale.T)}
    if method == "awq":
        found |= {
            "qweight": pack(np.ascontiguousarray(codes.T), 4, AWQ_OUTPUTS),
            "qzeros": pack(np.ascontiguousarray(stored_zero.T), 4, AWQ_OUTPUTS),
        }
    else:
        found |= {
            "qweight": np.ascontiguousarray(pack(codes, bits).T),
            "qzeros": pack(np.ascontiguousarray(stored_zero.T), bits),
            "g_idx": index.astype(np.int32),
        }
    return found, (codes.astype(np.float32) - zero_by_column) * by_column


def in_words(
    source: Path,
    out: Path,
    config: dict[str, Any],
    *,
    method: str,
    bits: int = 4,
    symmetric: bool = True,
    ordered: bool = False,
    pattern: str = "proj$",
) -> dict[str, np.ndarray]:
    """Write the checkpoint in `source` to `out` with the linear layers that `pattern` finds in words; their numbers."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored: dict[str, torch.Tensor] = {}
    numbers = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if base == name or not re.search(pattern, base):
            stored[name] = tensor
            continue
        found, numbers[base] = layer(
            tensor.float().numpy(), method, bits, symmetric=symmetric, ordered=ordered
        )
        stored |= {f"{base}.{end}": torch.from_numpy(value) for end, value in found.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((out / "config.json").read_text())
    settings["quantization_config"] = config
    (out / "config.json").write_text(json.dumps(settings))
    return numbers
