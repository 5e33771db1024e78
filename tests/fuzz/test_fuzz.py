"""Almost valid files and requests give a result or a DFlashError, in little time and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import readers
from tests.fuzz.run import run

INPUTS = 40  # per reader; `make fuzz` reads as many as its time allows


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    return dict(run(readers.READERS, INPUTS, seed=0))


@pytest.mark.parametrize("name", readers.READERS)
def test_almost_right_inputs_are_read_or_refused(problems: dict[str, str | None], name: str) -> None:
    assert problems[name] is None, problems[name]


def test_kept_inputs_belong_to_a_reader() -> None:
    kept = {path.name for path in (Path(readers.__file__).parent / "seeds").iterdir()}
    assert kept <= set(readers.READERS)


# What a faulty reader does in place of a real one, and what is said of it.
FAULTY = {
    "safetensors": ("raise KeyError(1)", "KeyError"),
    "index": ("while True: pass", "exit code -24"),
    "quantization": ("bytearray(1 << 40)", "MemoryError"),
    "prompts": ("import ctypes; ctypes.string_at(0)", "exit code -11"),
    "prompt": ("raise DFlashError('')", "0 characters"),
}


def test_the_fuzzer_sees_errors_hangs_memory_crashes_and_empty_messages(monkeypatch, tmp_path) -> None:
    text = "import tests.fuzz.run as run, tests.fuzz.readers as readers\n"
    text += "from dflash_trt.errors import DFlashError\nrun.SECONDS = 1\n"
    for name, (code, _) in FAULTY.items():
        text += f"def read(directory):\n    {code}\n"
        text += f"readers.READERS['{name}'] = readers.Reader(readers.READERS['{name}'].files, read)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    for name, problem in run([*FAULTY, "manifest"], 1, seed=0):
        assert problem is None if name == "manifest" else FAULTY[name][1] in str(problem), (name, problem)
