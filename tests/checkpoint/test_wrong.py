"""Builds from wrong checkpoints fail with one line that names the file, the tensor or the field, and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dflash_trt.building.build import build
from dflash_trt.errors import CheckpointError
from tests.doubles.checkpoints import make_drafter, make_target

INDEX, UP = "model.safetensors.index.json", "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_target(root / "target", shards=2)
    make_drafter(root / "drafter", root / "target")
    return root


def shards(target: Path) -> list[Path]:
    return sorted(target.glob("*.safetensors"))


def rewrite(file: Path, name: str, dtype: str | None) -> None:
    """Give a tensor another dtype, or remove it."""
    with safe_open(file, "pt") as stream:
        tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 - not a mapping
    tensor = tensors.pop(name)
    if dtype is not None:
        tensors[name] = tensor.to(getattr(torch, dtype))
    save_file(tensors, file)


def shard_of(target: Path, name: str) -> Path:
    return next(f for f in shards(target) if f'"{name}"'.encode() in f.read_bytes()[:20_000])


def truncated(target: Path) -> str:
    file = shards(target)[-1]
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 100)
    return (
        rf"{file.name}: {size - 100} bytes, but .* {size}: .* truncated, from tensor '.+' on; fetch it again"
    )


def dtype(target: Path) -> str:
    rewrite(file := shard_of(target, UP), UP, "int8")
    return rf"{file.name}: tensor '{UP}' is I8, supported are .*BF16"


def lost(target: Path) -> str:
    rewrite(shard_of(target, UP), UP, None)
    content = json.loads((target / INDEX).read_text())
    del content["weight_map"][UP]
    (target / INDEX).write_text(json.dumps(content))
    return rf"target: has no tensor '{UP}'; near names: model.layers.\d.mlp.up_proj.weight"


def other_layers(target: Path) -> str:
    config = json.loads((target / "config.json").read_text())
    changed = config | {"intermediate_size": 160}
    (target / "config.json").write_text(json.dumps(changed))
    shapes = (
        r"has shape \[128, 64\], but by config.json it has \[160, 64\]; the files are of different models"
    )
    return rf"safetensors: tensor 'model.layers.\d.mlp.\w+.weight' {shapes}"


@pytest.mark.parametrize("damage", [truncated, dtype, lost, other_layers], ids=lambda f: f.__name__)
def test_refuses_a_target(pair: Path, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    target = Path(shutil.copytree(pair / "target", tmp_path / "target"))
    message = damage(target)
    with pytest.raises(CheckpointError, match=message) as error:
        build(str(target), str(pair / "drafter"), tmp_path / "bundle")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "bundle").exists()
