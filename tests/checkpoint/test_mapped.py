"""Mapped weight files do not stay in resident memory while a plan is built or a checkpoint is quantized."""

from __future__ import annotations

import mmap
import re
import time
from pathlib import Path

import pytest

from dflash_trt.checkpoint.mapped import released

SIZE = 4 << 20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps").exists(), reason="memory is given back on Linux only"
)


def resident(file: Path) -> int:
    """Bytes of this process's mappings of `file` that are in memory."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    return sum(
        int(found[1]) << 10
        for mapping in mappings
        if mapping.split("\n", 1)[0].endswith(str(file))
        and (found := re.search(r"^Rss: +(\d+)", mapping, re.M))
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "model.safetensors"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "model.safetensors").symlink_to(file)
    return file


def test_what_was_read_is_given_back_and_can_be_read_again(file: Path, tmp_path: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        content = mapped[:]
        assert resident(file) == SIZE
        with released((tmp_path / "bundle").iterdir()):  # through its link there
            end = time.monotonic() + 60
            while resident(file):
                assert time.monotonic() < end
                time.sleep(0.01)
            assert mapped[:] == content
        assert mapped[:] == content


def test_what_may_have_been_written_to_stays(file: Path, tmp_path: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mine:
        mine[:] = bytes(SIZE)
        other = tmp_path / "bundle" / "other"
        other.write_bytes(bytes(SIZE))
        with other.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            with released((tmp_path / "bundle").iterdir()):
                assert mapped[:] == mine[:]
                end = time.monotonic() + 60
                while resident(other):  # so that one round is surely over
                    assert time.monotonic() < end
                    time.sleep(0.01)
            assert mine[:] == bytes(SIZE)
