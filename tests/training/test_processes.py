"""Training in two processes on one machine: one set of weights, and a resumed run ends as one that was not stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from dflash_trt.errors import DFlashError
from dflash_trt.files.reading import read_object
from dflash_trt.training.answers import Answer, AnswerFile
from dflash_trt.training.loop import Recipe, _same_recipe
from dflash_trt.training.target import FeatureCache


def test_no_process_reads_a_half_written_recipe(tmp_path: Path) -> None:
    file, seen = tmp_path / "recipe.json", []

    class First:
        """The first of two processes. It looks for the file when it meets the other."""

        num_processes = 2
        is_main_process = True

        def wait_for_everyone(self) -> None:
            seen.append(file.exists())

    _same_recipe(file, Recipe(steps=1), cast(Accelerator, First()))
    assert seen == [False]
    assert read_object(file)["processes"] == 2


def test_a_feature_cache_begins_beside_another_process(tmp_path: Path) -> None:
    (tmp_path / "features.1.part").write_text("{", encoding="utf-8")
    FeatureCache(tmp_path, {"taps": [1]})
    with pytest.raises(DFlashError, match="holds features of"):
        FeatureCache(tmp_path, {"taps": [2]})


def test_two_processes_train_one_drafter_and_resume_it(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    file = AnswerFile(tmp_path / "answers.jsonl")
    for number in range(12):
        prompt, answer = (random.integers(1, 500, size).tolist() for size in (8, 40))
        file.append(Answer(str(number), "", prompt, answer, 0.0, "length"))
    file.close()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
            *("-m", "tests.training.two_processes", str(tmp_path / "answers.jsonl"), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert read_object(tmp_path / "resumed" / "recipe.json")["processes"] == 2
    ends = [load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    assert torch.equal(ends[0]["straight"], ends[1]["straight"])  # both processes have the same weights
    for end in ends:
        assert torch.equal(end["resumed"], end["straight"])
    saved = load_file(tmp_path / "resumed" / "state" / "state.safetensors")
    assert any(name.startswith("optimizer|") for name in saved)
