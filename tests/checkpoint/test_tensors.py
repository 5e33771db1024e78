"""Safetensors: files of the library are read back exactly, and malformed headers are refused."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.tensors import Checkpoint, read_header
from dflash_trt.errors import CheckpointError

ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(5, 7, generator=generator).to(torch.bfloat16),
        "layers.1.weight": torch.randn(3, 2, 4, generator=generator).to(torch.float16),
        "norm.weight": torch.randn(11, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(4),
    }


def write(path: Path, header: object, data: bytes = bytes(24), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def write_shards(directory: Path, weight_map: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    first, second = tensors(0), {f"other.{name}": tensor for name, tensor in tensors(1).items()}
    save_file(first, directory / "model-00001-of-00002.safetensors")
    save_file(second, directory / "model-00002-of-00002.safetensors")
    names = {name: f"model-0000{1 + (name in second)}-of-00002.safetensors" for name in first | second}
    index = {"metadata": {"total_size": 1}, "weight_map": names | (weight_map or {})}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return first | second


def assert_same(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        array = checkpoint.array(name)
        assert array.shape == tuple(tensor.shape) == checkpoint[name].shape
        assert not array.flags.writeable
        bits = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert array.tobytes() == bits
        info = checkpoint[name]
        assert info.file.read_bytes()[info.offset : info.offset + info.nbytes] == bits


def test_reads_a_single_file(tmp_path: Path) -> None:
    expected = tensors()
    save_file(expected, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.files == (tmp_path / "model.safetensors",)
    assert_same(checkpoint, expected)
    assert checkpoint.array("layers.0.weight").dtype == ml_dtypes.bfloat16
    assert checkpoint.array("layers.1.weight").dtype == np.float16
    assert checkpoint.array("norm.weight").dtype == np.float32


def test_reads_shards(tmp_path: Path) -> None:
    expected = write_shards(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert [file.name[:11] for file in checkpoint.files] == ["model-00001", "model-00002"]
    assert_same(checkpoint, expected)


def test_reads_mxfp4(tmp_path: Path) -> None:
    """As published for gpt-oss, in bytes, and in the dtypes that safetensors has added since."""
    blocks = torch.arange(2 * 3 * 4 * 16, dtype=torch.uint8).reshape(2, 3, 4, 16)
    scales = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(2, 3, 4)
    tensors = {"w_blocks": blocks, "w_scales": scales, "w_e8m0": scales.clone().view(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.array("w_blocks"), blocks.numpy())
    np.testing.assert_array_equal(checkpoint.array("w_scales"), scales.numpy())
    assert checkpoint.array("w_e8m0").dtype == ml_dtypes.float8_e8m0fnu
    np.testing.assert_array_equal(checkpoint.array("w_e8m0").view(np.uint8), scales.numpy())


@pytest.mark.parametrize(
    "notes",
    [None, {}, {"format": "pt"}, {"a": None}, {"a": 1}, {"a": {"b": "c"}}, {"a": ["b"]}, [], "pt", 5, True],
)
def test_metadata_is_accepted_as_by_the_library(tmp_path: Path, notes: object) -> None:
    path = write(tmp_path / "model.safetensors", {"__metadata__": notes, "w": ENTRY})
    try:
        load_file(path)
    except SafetensorError:
        with pytest.raises(CheckpointError, match="__metadata__"):
            read_header(path)
    else:
        assert [tensor.name for tensor in read_header(path)] == ["w"]


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    path = write(
        tmp_path / "model.safetensors", {"w": ENTRY | {"shape": [2**26], "data_offsets": [0, 2**28]}}, b""
    )
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**28)  # sparse
    tracemalloc.start()
    array = Checkpoint(tmp_path).array("w")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert array.nbytes == 2**28
    assert peak < 2**20


def test_names_what_is_near(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'norms.weight'; near names: norm.weight"):
        Checkpoint(tmp_path)["norms.weight"]


HEADERS: list[tuple[object, str]] = [
    ([1], "header: holds a JSON list"), (b"{", "header: not valid JSON"),
    (b'{"w": 1, "w": 2}', "'w' appears more than once"), ({"w": 1}, 'header entry "w" is 1, expected an object'),
    ({"w": {}}, "w.dtype is missing"), ({"w": ENTRY | {"dtype": "F3"}}, "w.dtype is 'F3', supported are"),
    ({"w": ENTRY | {"shape": 6}}, "w.shape is 6, expected a list of integers"),
    ({"w": ENTRY | {"shape": [-2, -3]}}, r"w.shape\[0\] is -2"),
    ({"w": ENTRY | {"shape": [1] * 9}}, "w.shape has 9 entries, expected at most 8"),
    ({"w": ENTRY | {"shape": [2**31 - 1] * 8}}, "w.data_offsets span 24 bytes, but F32"),
    ({"w": ENTRY | {"data_offsets": [24, 0]}}, r"w.data_offsets is \[24, 0\]"),
    ({"w": ENTRY | {"data_offsets": [0]}}, r"w.data_offsets is \[0\]"),
    ({"w": ENTRY | {"data_offsets": [0, 20]}}, r"span 20 bytes, but F32 \[2, 3\] takes 24"),
    ({"w": ENTRY, "v": ENTRY}, "overlaps the tensor before it"),
    ({"w": ENTRY | {"shape": [5], "data_offsets": [4, 24]}}, "leaves a gap before it"),
    ({"w": ENTRY | {"shape": [5], "data_offsets": [0, 20]}}, "longer than its header says"),
    ({"w": ENTRY | {"shape": [3, 3], "data_offsets": [0, 36]}}, "truncated, from tensor 'w' on; fetch it again"),
    ({}, "longer than its header says"), (b'{"a\\u001b[2J\\ud800": {}}', r": a\\x1b\[2J\\ud800\.dtype is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "message"), HEADERS)
def test_refuses_a_header(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_header(write(tmp_path / "model.safetensors", header))
    assert str(tmp_path / "model.safetensors") in str(error.value)


@pytest.mark.parametrize("length", [2**63, 100_000_001, 1000])
def test_refuses_a_header_length_before_allocating(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", {"w": ENTRY}, length=length)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=f"claims a length of {length} bytes"):
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18


def test_truncation_names_both_sizes(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=rf"{len(whole) - 10} bytes, but its header describes"):
        Checkpoint(tmp_path)
    for size in range(0, 200, 7):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"norm.weight": "model-00003-of-00002.safetensors"}, "has no such file; fetch it"),
        ({"norm.weight": "model-00002-of-00002.safetensors"}, "'norm.weight' should be in model-00002"),
        ({"absent": "model-00001-of-00002.safetensors"}, r"'absent' should be in model-00001.*"),
        ({"norm.weight": "../model.safetensors"}, "expected the name of a .safetensors file"),
        ({"norm.weight": "/tmp/model.safetensors"}, "expected the name of a .safetensors file"),
        ({"norm.weight": "sub/model.safetensors"}, "expected the name of a .safetensors file"),
        ({"norm.weight": "config.json"}, "expected the name of a .safetensors file"),
        ({"norm.weight": ["model.safetensors"]}, "expected a string"),
    ],
)
def test_refuses_an_index(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message) as error:
        Checkpoint(tmp_path)
    assert "model.safetensors.index.json" in str(error.value)


def test_refuses_an_index_without_map(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="weight_map is missing or empty"):
        Checkpoint(tmp_path)


def test_the_index_decides_which_shard_has_a_tensor(tmp_path: Path) -> None:
    """Tools that wrote the shards anew may leave older copies in the others."""
    expected = write_shards(tmp_path)
    second = {name: tensor for name, tensor in expected.items() if name.startswith("other.")}
    save_file(second | tensors(2), tmp_path / "model-00002-of-00002.safetensors")
    assert_same(Checkpoint(tmp_path), expected)


def test_refuses_a_tensor_in_two_shards_that_the_index_does_not_name(tmp_path: Path) -> None:
    write_shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    del fields["weight_map"]["norm.weight"]
    index.write_text(json.dumps(fields))
    save_file(tensors() | tensors(1), tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"'norm.weight' is in both model-00001-of-00002"):
        Checkpoint(tmp_path)


def test_refuses_both_forms_at_once(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has both model.safetensors and"):
        Checkpoint(tmp_path)


def test_names_other_formats(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is there, but only safetensors is read"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint(tmp_path / "nowhere")
