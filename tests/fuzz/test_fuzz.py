"""Almost valid files and requests give a result or a DFlashError, in little time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import readers
from tests.fuzz.run import run

INPUTS = 60  # per reader; `make fuzz` reads as many as its time allows


@pytest.mark.parametrize("name", readers.READERS)
def test_almost_right_inputs_are_read_or_refused(name: str) -> None:
    problem = run(name, INPUTS, seed=0)
    assert problem is None, problem


def test_kept_inputs_belong_to_a_reader() -> None:
    kept = {path.name for path in (Path(readers.__file__).parent / "seeds").iterdir()}
    assert kept <= set(readers.READERS)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise KeyError(1)", "KeyError"),
        ("while True: pass", "exit code -24"),
        ("bytearray(1 << 40)", "MemoryError"),
        ("import ctypes; ctypes.string_at(0)", "exit code -11"),
        ("raise DFlashError('')", "0 characters"),
    ],
    ids=["error", "hang", "memory", "crash", "message"],
)
def test_the_fuzzer_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, message: str) -> None:
    """Put a faulty reader in place of a real one, in the process that reads."""
    (tmp_path / "sitecustomize.py").write_text(
        "import tests.fuzz.run as run, tests.fuzz.readers as readers\n"
        "from dflash_trt.errors import DFlashError\n"
        "run.SECONDS = 1\n"
        f"def read(directory):\n    {code}\n"
        "readers.READERS['prompt'] = readers.Reader(readers.READERS['prompt'].files, read)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    problem = run("prompt", 1, seed=0)
    assert problem is not None
    assert message in problem
