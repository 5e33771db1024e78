"""Quantized layers that are adjacent in their file, joined into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint.linears import StoredLinear, joined, stored_linear
from dflash_trt.checkpoint.tensors import Checkpoint
from tests.doubles.quantized_checkpoints import encoded, write_quant_config, write_safetensors

COLUMNS, ROWS = 128, {"q": 48, "k": 16, "v": 32}
FORMATS = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "W4A16_MXFP4", "W4A16_AWQ", "W8A16"]


def whole(algorithm: str) -> dict[str, np.ndarray]:
    w = np.random.default_rng(0).standard_normal((sum(ROWS.values()), COLUMNS)).astype(np.float32)
    return {name.removeprefix("l."): value for name, value in encoded("l", algorithm, w).items()}


def write(directory: Path, algorithm: str, order: str = "qkv", **changes: Any) -> dict[str, StoredLinear]:
    """The rows of `whole` as separate layers, grouped by kind of tensor. "o" is a layer that is not requested."""
    tensors: dict[str, Any] = {}
    for suffix, value in whole(algorithm).items():
        end, parts = 0, {"o": value}
        for name, rows in ROWS.items():
            count = rows * len(value) // sum(ROWS.values()) if np.ndim(value) else 0
            parts[name], end = value[end : end + count] if np.ndim(value) else value, end + count
        tensors |= {f"{name}.{suffix}": parts[name] for name in order}
    if algorithm == "FP8":
        tensors |= {f"{name}.input_scale": np.float32(0.5) for name in order}
    write_quant_config(directory, algorithm)
    write_safetensors(directory / "model.safetensors", tensors | changes)
    checkpoint = Checkpoint(directory)
    layers = {name: stored_linear(checkpoint, name, COLUMNS, rows) for name, rows in ROWS.items()}
    return {name: layer for name, layer in layers.items() if layer is not None}


@pytest.mark.parametrize("algorithm", FORMATS)
def test_layers_one_behind_the_other_are_one(tmp_path: Path, algorithm: str) -> None:
    layers = write(tmp_path, algorithm)
    ((names, found),) = joined(layers)
    assert names == ("q", "k", "v")
    expected = whole(algorithm)
    content = (tmp_path / "model.safetensors").read_bytes()
    for suffix, info in (("weight", found.weight), ("weight_scale", found.scale)):
        assert info.shape == np.shape(expected[suffix])
        assert content[info.offset : info.offset + info.nbytes] == expected[suffix].tobytes()
    assert found.global_scale is layers["q"].global_scale
    assert found.algorithm is layers["q"].algorithm


def test_as_many_as_lie_together(tmp_path: Path) -> None:
    """As in files whose tensors are in alphabetical order."""
    layers = write(tmp_path, "NVFP4", "koqv")
    assert [names for names, _ in joined(layers)] == [("k",), ("q", "v")]
    assert joined(layers)[0][1] == layers["k"]
    assert joined({}) == []


@pytest.mark.parametrize(
    ("algorithm", "changes", "expected"),
    [
        ("NVFP4", {"v.weight_scale_2": np.float32(3)}, [("q", "k"), ("v",)]),
        ("FP8", {"k.input_scale": np.float32(0.25)}, [("q",), ("k",), ("v",)]),
        ("FP8", {"q.weight_scale": np.float32(7)}, [("q",), ("k", "v")]),
        ("NVFP4", {"v.input_scale": np.float32(1)}, [("q", "k"), ("v",)]),
        ("W4A16_AWQ", {"q.pre_quant_scale": np.ones(COLUMNS, np.float32)}, [("q",), ("k", "v")]),
    ],
)
def test_scales_of_their_own_keep_layers_apart(
    tmp_path: Path, algorithm: str, changes: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    assert [names for names, _ in joined(write(tmp_path, algorithm, **changes))] == expected
