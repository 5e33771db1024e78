"""A bundle of a random pair and prompts for it, for tests of requests that are independent of the model.

Conftests import it, which must work without torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dflash_trt.building.build import build


@pytest.fixture(scope="package")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts of 256 tokens. Its drafts are sometimes right."""
    from tests.doubles.checkpoints import make_drafter, make_target

    directory = tmp_path_factory.mktemp("random")
    target = make_target(directory / "target", favourites=6, layers=3)
    drafter = make_drafter(directory / "drafter", target)
    return build(str(target), str(drafter), directory / "bundle", max_seq_len=256).path


def prompt(length: int, seed: int = 0) -> list[int]:
    from tests.doubles.checkpoints import VOCAB

    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
