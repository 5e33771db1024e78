"""A bundle for the tests of this folder."""

from pathlib import Path

import pytest

from tests.doubles.bundles import bundle

__all__ = ["bundle"]


@pytest.fixture
def hanging_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A prompt over which no pass of the processes to be started ends."""
    (tmp_path / "sitecustomize.py").write_text("""
import threading
from dflash_trt.decoding.pair import Pair

verified = Pair.verified

def hang(pair, active, *given):
    if active[0].prompt == [9, 9, 9]:
        threading.Event().wait()
    return verified(pair, active, *given)

Pair.verified = hang
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return [9, 9, 9]
