"""Training in two processes on one machine: one set of weights, and a resumed run ends as one that was not stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from dflash_trt.files.reading import read_object
from dflash_trt.training.answers import Answer, AnswerFile


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
        env=os.environ | {"ACCELERATE_MIXED_PRECISION": "no"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert read_object(tmp_path / "resumed" / "recipe.json")["processes"] == 2
    ends = [load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1)]
    assert torch.equal(ends[0]["straight"], ends[1]["straight"])  # both processes have the same weights
    for end in ends:
        assert torch.equal(end["resumed"], end["straight"])
    saved = load_file(tmp_path / "resumed" / "state" / "state.safetensors")
    assert any(name.startswith("optimizer|") for name in saved)
