"""Builds from wrong checkpoints fail with one line that names the file, the tensor or the field, and the way out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.building.build import build
from dflash_trt.errors import CheckpointError
from tests.doubles.checkpoints import make_drafter, make_target, write_json

UP = "model.layers.1.mlp.up_proj.weight"
Tensors = dict[str, torch.Tensor]
# What becomes of the tensors and the configuration, and what the error says.
WRONG: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "dtype": (
        lambda t: t | {UP: t[UP].to(torch.int8)}, {},
        rf"model\.safetensors: tensor '{UP}' is I8, supported are .*BF16",
    ),
    "lost": (
        lambda t: {name: tensor for name, tensor in t.items() if name != UP}, {},
        rf"target: has no tensor '{UP}'; near names: model.layers.\d.mlp.up_proj.weight",
    ),
    "other layers": (
        dict, {"intermediate_size": 160},
        r"model\.safetensors: tensor 'model.layers.\d.mlp.\w+.weight' has shape \[128, 64\], but by config.json it has "
        r"\[160, 64\]; the files are of different models",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    make_drafter(root / "drafter", make_target(root / "target"))
    return root


@pytest.mark.parametrize("wrong", WRONG)
def test_refuses_a_target(pair: Path, tmp_path: Path, wrong: str) -> None:
    change, fields, message = WRONG[wrong]
    target = Path(shutil.copytree(pair / "target", tmp_path / "target"))
    save_file(change(load_file(pair / "target" / "model.safetensors")), target / "model.safetensors")
    write_json(target / "config.json", json.loads((target / "config.json").read_text()) | fields)
    with pytest.raises(CheckpointError, match=message) as error:
        build(str(target), str(pair / "drafter"), tmp_path / "bundle")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "bundle").exists()
