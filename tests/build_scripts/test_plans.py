"""The generated checkpoints of build_scripts.bench.plans, and what it reads from a build."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from build_scripts.bench import plans
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.models.configs import read_drafter_config, read_target_config
from tests.doubles.family_checkpoints import make_gpt_oss, make_gpt_oss_drafter


def test_a_generated_pair_has_the_layers_and_the_tensors_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = make_gpt_oss(tmp_path / "known"), tmp_path / "drafter"
    make_gpt_oss_drafter(known[1], known[0], layers=1)
    monkeypatch.setattr(plans, "known_configs", lambda pair: known)
    (tmp_path / "made").mkdir()
    sizes = plans.write_pair(tmp_path / "made", "any", 2, None)
    target, drafter = tmp_path / "made" / "target", tmp_path / "made" / "drafter"
    assert read_target_config(target).num_hidden_layers == 2
    assert set(read_drafter_config(drafter).target_layer_ids) <= {0, 1}
    made, whole = Checkpoint(target), Checkpoint(known[0])
    assert set(made.tensors) == {
        name for name in whole.tensors if ".layers.2." not in name and ".layers.3." not in name
    }
    for name, tensor in made.tensors.items():
        assert (tensor.dtype, tensor.shape) == (whole[name].dtype, whole[name].shape), name
    assert sizes["target"] == sum(tensor.nbytes for tensor in made.tensors.values())
    contents = []
    for tensor in made.tensors.values():
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            contents.append(file.read(tensor.nbytes))
        if tensor.name.endswith("_scales"):
            assert set(np.frombuffer(contents[-1], np.uint8).tolist()) <= {118, 119, 120, 121}
    large = [each for each in contents if len(each) > 64]
    assert len(set(large)) == len(large)  # a plan keeps equal tensors once


def test_a_build_is_measured_by_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(command: list[str]) -> tuple[float, int]:
        asked.extend(command)
        return 1.26, 3000

    entry: dict[str, Any] = {"size": 1000, "scratch_bytes": 7, "weight_bytes": {"BF16": 600, "UINT8": 200}}
    found = {"plans": {"sm120/target": entry, "sm120/drafter": entry | {"size": 500}}}
    monkeypatch.setattr(plans, "measure", measure)
    monkeypatch.setattr(plans, "inspect", lambda bundle: found)
    made = plans.measured(tmp_path, "120", "target=nvfp4", 8, 4096)
    options = dict(itertools.pairwise(asked))
    assert (options["--max-batch-size"], options["--max-seq-len"], options["--precision"]) == (
        "8",
        "4096",
        "target=nvfp4",
    )
    assert made["peak_rss_over_largest_plan"] == 3.0
    assert made["plans"]["sm120/target"] == entry | {"size_over_weights": 1.25}
