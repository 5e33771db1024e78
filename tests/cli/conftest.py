"""A small random pair, its bundle, and the results of commands."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import main
from tests.doubles.checkpoints import make_drafter, make_target


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


class Output:
    """The result of main(): exit code, standard output, standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], words: Sequence[object]) -> None:
        capsys.readouterr()
        try:
            self.code: Any = main([str(word) for word in words])
        except SystemExit as ended:  # of wrong usage, or of --help
            self.code = ended.code
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Output]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command of dflash-trt, with a text as its standard input."""

    def run(*words: object, stdin: str | None = None) -> Output:
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        return Output(capsys, words)

    return run
