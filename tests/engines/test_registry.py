"""The table of engines: what it knows, and what it leaves alone until it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.building.build import build
from dflash_trt.engines import registry
from dflash_trt.errors import BuildError


def test_every_engine_is_found_by_its_name() -> None:
    for name in registry.NAMES:
        assert registry.find(name).name == name


def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"--engine is 'onnx', .*onnxruntime, tensorrt-rtx, tensorrt, tensorrt-llm"
    ):
        build("tiny", None, tmp_path / "b", engine="onnx")


def test_options_of_another_engine_are_refused(tmp_path: Path) -> None:
    from dflash_trt.engines.tensorrt.plans import Options

    with pytest.raises(BuildError, match="--engine is tensorrt-llm, but --compute-capability"):
        build("tiny", None, tmp_path / "b", engine="tensorrt-llm", tensorrt=Options())
    with pytest.raises(BuildError, match="--engine is tensorrt-llm, and --gpu is missing"):
        build("tiny", None, tmp_path / "b", engine="tensorrt-llm")
    assert not list(tmp_path.iterdir())


def test_a_build_for_onnxruntime_imports_nothing_of_tensorrt(tmp_path: Path) -> None:
    program = (
        "import json, sys; from dflash_trt.cli import main\n"
        f"code = main(['build', '--target', 'tiny', '--weights', 'none', '--out', {str(tmp_path / 'b')!r}])\n"
        "print(json.dumps([code, sorted(sys.modules)]))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, modules = json.loads(answer.stdout.splitlines()[-1])
    assert code == 0
    rooms = (
        "tensorrt",
        "torch",
        "triton",
        "dflash_plugins",
        "dflash_trt.engines.tensorrt",
        "dflash_trt.trtllm",
    )
    assert [name for name in modules if name.split(".")[0] in rooms or name.startswith(rooms)] == []
