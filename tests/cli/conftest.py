"""A small random pair, its bundle, and the results of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.cli import main
from tests.doubles.checkpoints import make_drafter, make_target
from tests.doubles.commands import command

__all__ = ["command"]  # the fixture


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    target, drafter = directory / "target", directory / "drafter"
    for each in (target, drafter):
        each.mkdir()
    make_target(target)
    make_drafter(drafter, target)
    return target, drafter


@pytest.fixture(scope="package")
def bundle(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "random"
    assert main(build_arguments(pair, out, "--max-seq-len", "256")) == 0
    return out


def build_arguments(pair: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    return ["build", "--target", str(pair[0]), "--drafter", str(pair[1]), "--out", str(out), *more]
