"""Targets in training: features and embedded tokens are those that the target's graph and its drafter's have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_trt.models.configs import read_target_config
from dflash_trt.training.target import FrozenTarget
from tests.doubles.reference import target_outputs
from tests.doubles.text_checkpoints import (
    GEMMA_IMAGES,
    MINISTRAL_IMAGES,
    load_text,
    make_gemma,
    make_ministral,
)


@pytest.mark.parametrize(("make", "name"), [(make_ministral, MINISTRAL_IMAGES), (make_gemma, GEMMA_IMAGES)])
def test_the_text_part_of_models_with_images(make: Callable[..., Path], name: str, tmp_path: Path) -> None:
    directory, tokens = make(tmp_path / "target", name, dtype="float32"), list(range(20))
    model, taps = load_text(directory), (-1, 0, 2)
    frozen = FrozenTarget(directory, read_target_config(directory), taps, torch.device("cpu"), torch.float32)
    _, expected = target_outputs(model, tokens, taps)
    ids = torch.tensor([tokens])
    torch.testing.assert_close(frozen.features(ids)[0], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(frozen.embed(ids)[0], expected[:, : frozen.head.shape[1]])
