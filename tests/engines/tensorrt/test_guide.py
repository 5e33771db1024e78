"""The commands of docs/guides/gpu.md, in their order, on doubles of CUDA and TensorRT-RTX, with small weights."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.checkpoint.catalogue import PAIRS, SHIPPED
from dflash_trt.cli import main
from tests.doubles.one_gpu import one_gpu

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "gpu.md"
# Commands of the page that do not run here, and why.
NOT_RUN = {
    "python3 -m venv .venv && . .venv/bin/activate": "makes an environment",
    "pip install '.[tensorrt-rtx]'": "downloads packages",
    "pip install '.[tensorrt-llm]'": "downloads packages",
    "dflash-trt selftest --first-gpu": "starts commands of its own: tests/reports/test_first_gpu.py",
    "dflash-trt serve bundles/gpt-oss-20b": "runs until it is stopped: tests/serving/openai",
    "bundles/gpt-oss-120b/launch/container.sh": "needs a container: tests/trtllm/test_launch.py",
}
# What makes commands small enough for doubles, which have no kernels.
SMALLER = {
    "build": ["--max-seq-len", "256", "--tp", "2", "--ep", "2"],
    "build --engine tensorrt-rtx": ["--max-seq-len", "256", "--plugins", "none", "--prefill-chunk", "64"],
    "chat": ["--max-tokens", "4"],
    "verify": ["--limit", "1", "--temperatures", "0", "--max-tokens", "8"],
}


def commands() -> list[str]:
    """The lines of the page's blocks, without remarks."""
    return [line.partition(" # ")[0].strip() for line in re.findall(r"^ {4}(\S.*)$", PAGE.read_text(), re.M)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One GPU of compute capability 12.0, and a hub on which every checkpoint is that of the pair tiny-gpt-oss."""
    drafters = {pair.drafter_repo for pair in PAIRS}

    def download(repo: str, **_: object) -> str:
        return str(SHIPPED / "tiny-gpt-oss" / ("drafter" if repo in drafters else "target"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.chdir(tmp_path)
    with one_gpu(120):
        yield


def test_the_commands_of_the_page_run_in_their_order(
    machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(NOT_RUN) <= set(commands())
    for command in commands():
        if command in NOT_RUN:
            continue
        program, name, *words = shlex.split(command)
        assert program == "dflash-trt", f"{command}: run it here, or give a reason in NOT_RUN"
        engine = f"{name} --engine tensorrt-rtx" if "tensorrt-rtx" in words else name
        assert main([name, *words, *SMALLER.get(engine, SMALLER.get(name, []))]) == 0, command
    capsys.readouterr()
