"""A bundle of a random pair, for tests of requests that are independent of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.building.build import build


@pytest.fixture(scope="package")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts of 256 tokens. Its drafts are sometimes right. A conftest imports it, which must work without torch."""
    from tests.doubles.checkpoints import make_drafter, make_target

    directory = tmp_path_factory.mktemp("random")
    target = make_target(directory / "target", favourites=6, layers=3)
    drafter = make_drafter(directory / "drafter", target)
    return build(str(target), str(drafter), directory / "bundle", max_seq_len=256).path
