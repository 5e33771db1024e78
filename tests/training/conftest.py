"""What the tests of training share: the pair `tiny` as a bundle, and its target's answers to shipped prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.building.build import build
from dflash_trt.prompts import read_prompts
from dflash_trt.training.recipe import AnswerSampling
from dflash_trt.training.regenerate import regenerate_with_bundle


@pytest.fixture(autouse=True)
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers on every machine."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("tiny", None, tmp_path_factory.mktemp("training") / "tiny").path


@pytest.fixture(scope="session")
def answers(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To all shipped prompts but the first eight, with which drafters are measured."""
    out = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    regenerate_with_bundle(bundle, read_prompts(None, 0)[8:104], out, AnswerSampling(96, (0.0,)), threads=1)
    return out
