"""A run in two processes, for test_run.py: straight to the end, and with a resume in the middle.

Usage: torchrun --standalone --nproc_per_node 2 -m tests.training.two_processes ANSWERS OUT
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.models.configs import read_drafter_config, read_target_config
from dflash_trt.training.answers import read_answers
from dflash_trt.training.blocks import Batches
from dflash_trt.training.loop import make_accelerator, train
from dflash_trt.training.model import DrafterModel
from dflash_trt.training.recipe import Recipe
from dflash_trt.training.target import FrozenTarget

TARGET, DRAFTER = SHIPPED / "tiny" / "target", SHIPPED / "tiny" / "drafter"
RECIPE = Recipe(steps=4, batch_size=2, anchors=8, learning_rate=2e-3, max_length=96)


def main() -> None:
    answers, out = Path(sys.argv[1]), Path(sys.argv[2])
    accelerator = make_accelerator()
    assert accelerator.num_processes == 2
    target = FrozenTarget(TARGET, read_target_config(TARGET), (1, 3, 5, 7), accelerator.device, torch.float32)
    batches = Batches(read_answers(answers), RECIPE.batch_size, RECIPE.max_length, 0)
    ends = []
    for name, stops in (("straight", (4,)), ("resumed", (2, 4))):
        for seed, steps in enumerate(stops):  # the state must win over other initial weights
            torch.manual_seed(seed)
            drafter = DrafterModel(read_drafter_config(DRAFTER))
            train(
                drafter, target, batches, replace(RECIPE, steps=steps), out / name, accelerator, save_every=2
            )
        ends.append(torch.cat([p.detach().flatten() for p in drafter.parameters()]))
    save_file(
        dict(zip(("straight", "resumed"), ends, strict=True)),
        out / f"{accelerator.process_index}.safetensors",
    )


if __name__ == "__main__":
    main()
