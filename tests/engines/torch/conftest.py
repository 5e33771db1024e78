"""A GPU's double, and pairs for it in float32, where torch's operators take the kernels' place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.torch import opening
from tests.doubles import triton_interpreter  # noqa: F401  # corrects it
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.one_gpu import one_gpu
from tests.doubles.two_engines import FLOAT32


@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with one_gpu(on_host=False) as patch:
        patch.setattr(opening, "warm_up", lambda *_, **__: 0)
        yield patch


def _built(directory: Path, tree_width: int) -> Bundle:
    target = make_target(directory / "target", favourites=6)
    drafter = make_drafter(directory / "drafter", target, block_size=4, layers=1)
    given = {"engine": "torch", "precision": FLOAT32, "max_seq_len": 100, "tree_width": tree_width}
    return build(str(target), str(drafter), directory / "bundle", **given)


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return _built(tmp_path_factory.mktemp("chains"), 1)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A pair that verifies trees too."""
    with one_gpu():
        return _built(tmp_path_factory.mktemp("wide"), 2)
