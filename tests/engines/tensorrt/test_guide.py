"""The commands of docs/guides/gpu.md, in their order, with small weights: torch's on the CPU, the others on doubles."""

from __future__ import annotations

import io
import re
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub.errors import EntryNotFoundError

from dflash_trt.checkpoint.catalogue import PAIRS, SHIPPED
from dflash_trt.cli import main
from tests.doubles.one_gpu import one_gpu

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "gpu.md"
# Commands of the page that do not run here, and why.
NOT_RUN = {
    "python3 -m venv .venv && . .venv/bin/activate": "makes an environment",
    "pip install '.[torch,serve]' 'torch==2.11.*'": "downloads packages",
    "build_scripts/first_gpu.sh first-gpu.tar.gz": "measures for minutes",
    "bundles/gpt-oss-120b/launch/container.sh": "needs a container: tests/trtllm/test_launch.py",
}
# Commands that begin so need a server, or layers that these weights lack (tests/quantization/test_tensorrt_forms.py).
LEFT_OUT = ("dflash-trt serve", "curl", "dflash-trt build --target qwen3.8-27b-nvfp4")
# What makes commands small enough.
SMALLER = {
    "build --engine torch": ["--max-seq-len", "512"],
    "build --engine tensorrt-llm": ["--max-seq-len", "256"],
    "build --engine tensorrt-rtx": ["--max-seq-len", "256", "--prefill-chunk", "64"],
    "chat": ["--max-tokens", "4"],
    "verify": ["--limit", "1", "--temperatures", "0", "--batch-sizes", "1", "--max-tokens", "4"],
    "verify --widths": ["--limit", "1", "--max-tokens", "4", "--widths", "1,2", "--batch-sizes", "2"],
    "bench": ["--concurrency", "1", "--requests", "1", "--max-tokens", "4", "--methods", "plain,draft"],
}


def commands() -> list[str]:
    """The lines of the page's blocks, without remarks."""
    return [line.partition(" # ")[0].strip() for line in re.findall(r"^ {4}(\S.*)$", PAGE.read_text(), re.M)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub whose checkpoints are those of tiny, and of tiny-gpt-oss for gpt-oss, and which is asked over no network;
    and a line for each chat.
    """
    drafters = {pair.drafter_repo for pair in PAIRS}

    def download(repo: str, **_: object) -> str:
        return str(
            SHIPPED
            / ("tiny-gpt-oss" if "gpt-oss" in repo else "tiny")
            / ("drafter" if repo in drafters else "target")
        )

    def absent(repo: str, name: str, **_: object) -> NoReturn:
        raise EntryNotFoundError(f"{repo} has no {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", absent)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.chdir(tmp_path)


def test_the_commands_of_the_page_run_in_their_order(
    machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(NOT_RUN) <= set(commands())
    for command in commands():
        if command in NOT_RUN or command.startswith(LEFT_OUT):
            continue
        program, name, *words = shlex.split(command)
        assert program == "dflash-trt", f"{command}: run it here, or give a reason in NOT_RUN"
        kind = next((each for each in SMALLER if each.split()[0] == name and each.split()[-1] in words), name)
        # A GPU of compute capability 12.0; torch is too slow on its double.
        with nullcontext() if "torch" in words or "bundles/qwen3-8b" in words else one_gpu(120):
            assert main([name, *words, *SMALLER.get(kind, [])]) == 0, command
    said = capsys.readouterr().out
    assert "all equal" in said
    assert "exact mode: " not in said  # which takes all widths
