"""Drafters for Gemma 4 on ONNX Runtime: their drafts are those of plain torch, and the tokens those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional as F

from dflash_trt.building.build import build
from dflash_trt.errors import PairError
from tests.doubles.checkpoints import make_drafter
from tests.doubles.kind_checkpoints import make_eagle3, make_gemma_dspark, make_jetspec
from tests.doubles.reference import Drafter
from tests.doubles.reference_kinds import GemmaDSpark
from tests.doubles.speculators import SpeculatorsBlock, as_speculators
from tests.doubles.text_checkpoints import EXPERTS, GEMMA, load_text, make_gemma
from tests.models.test_kinds import (  # noqa: F401  # the tests run on this module's `model` and `bundle`
    bundle,
    test_drafts,
    test_tokens_are_those_of_plain_decoding,
)

SLIDING, FULL = "sliding_attention", "full_attention"


def as_z_lab(out: Path, target: Path) -> Path:
    """Six taps, four windows and a layer that sees all, blocks of 16, the soft-cap of the target."""
    return make_drafter(
        out,
        target,
        taps=(0, 1, 2, 3, 4, 5),
        layers=5,
        layer_types=[SLIDING] * 4 + [FULL],
        sliding_window=9,
        block_size=16,
        softcap=4.0,
    )


class RedHat(SpeculatorsBlock):
    """Trained on embedded rows as they are stored, without the target's factor."""

    def embed(self, target: Any, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, target.model.embed_tokens.weight)


CASES: dict[str, tuple[Callable[[Path, Path], Path], Callable[[Path], Any]]] = {
    "z-lab": (as_z_lab, Drafter),
    "DeepSpec's DSpark": (make_gemma_dspark, GemmaDSpark),
    "DeepSpec's DFlash": (lambda o, t: make_gemma_dspark(o, t, rank=0, keys_as_values=False), GemmaDSpark),
    "speculators": (
        lambda o, t: as_speculators(make_jetspec(o, t), t, "dflash", entered=(1, 6), vocabulary=200),
        RedHat,
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("target"), GEMMA, dtype="float32", favourites=6, **EXPERTS)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return load_text(target)


@pytest.fixture(scope="module", params=CASES)
def drafter(
    request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    make, reference = CASES[request.param]
    path = make(tmp_path_factory.mktemp("drafter"), target)
    return path, reference(path)


def test_eagle3_is_refused(target: Path, tmp_path: Path) -> None:
    """Its embedded rows are the target's, which Gemma scales."""
    path = make_eagle3(tmp_path / "drafter", target)
    with pytest.raises(PairError, match="EAGLE-3 heads are not supported"):
        build(str(target), str(path), tmp_path / "out")
