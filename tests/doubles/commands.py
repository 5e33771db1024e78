"""Runs commands of dflash-trt in this process, and keeps what they print."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dflash_trt.cli import main


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
