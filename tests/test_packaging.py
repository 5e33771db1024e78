"""What an installation needs: the core runs with its declared dependencies alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({blocked!r}))  # None: importing it fails
import dflash_trt
names = [m.name for m in pkgutil.walk_packages(dflash_trt.__path__, "dflash_trt.", onerror=lambda name: None)]
names = [name for name in names if not name.endswith("__main__") and not name.startswith({on_gpus!r})]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_the_core_imports_nothing_that_only_tests_install() -> None:
    blocked = ("torch", "transformers", "safetensors", "hypothesis", "pytest", "jsonschema", "triton", "gguf")
    # What runs on a GPU needs torch, and what compiles kernels needs triton; the rest of the package neither.
    plugins = [f"dflash_plugins.{name}" for name in ("kernels.", "launch", "moe", "compiler", "rounds")]
    engines = [f"dflash_trt.engines.tensorrt.{name}" for name in ("engine", "device_pair")]
    code = IMPORT_ALL.format(blocked=blocked, on_gpus=(*plugins, *engines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def versions(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


@pytest.mark.parametrize("name", ["run", "test", "server"])
def test_the_locked_versions_are_those_that_pyproject_allows(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.]+( ; .+)?", line)] == []
    assert "://" not in "".join(lines)
    for needed in project["dependencies"]:
        package, floor = needed.split(">=")
        locked = [line.split(" ;")[0].split("==")[1] for line in lines if line.startswith(f"{package}==")]
        assert locked, f"{package} is not locked: run make lock"
        assert all(versions(version) >= versions(floor) for version in locked), needed
