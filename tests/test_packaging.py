"""The core runs with its declared dependencies alone."""

from __future__ import annotations

import os
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
import dflash_plugins, dflash_trt
names = [
    module.name
    for package in (dflash_trt, dflash_plugins)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None)
]
names = [name for name in names if not name.endswith("__main__") and not name.startswith({skipped!r})]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
# Packages of extras, of a GPU, and of the tests.
NOT_CORE = (
    *("torch", "transformers", "safetensors", "modelopt", "triton", "gguf", "accelerate"),
    *("tensorrt", "tensorrt_rtx", "tensorrt_llm", "hypothesis", "pytest"),
    *("starlette", "uvicorn", "pydantic", "pydantic_core", "openai", "prometheus_client"),
)


def test_the_core_imports_nothing_that_only_extras_install() -> None:
    # GPU code and training need torch, kernels need triton, and the servers need their extras.
    with_kernels = "kernels. launch layers packed"
    plugins = [f"dflash_plugins.{name}" for name in with_kernels.split()]
    with_tensors = {
        "device": "adjusting arrays caches following kernels logprobs opening rounds runner stream",
        "tensorrt": "contexts opening runner",
        "torch": "kernels layers opening operators packed program runner weights",
    }
    engines = [
        f"dflash_trt.engines.{room}.{n}" for room, names in with_tensors.items() for n in names.split()
    ]
    names = (
        "app call_grammar chat completions connections errors gate generation model protocol reading responses "
        "structure"
    )
    routes = [f"dflash_trt.serving.openai.{name}" for name in names.split()]
    with_torch = "blocks checkpoint dflash2 export fit loop model run target"
    training = [f"dflash_trt.training.{name}" for name in with_torch.split()]
    skipped = (*plugins, *engines, *routes, *training, "dflash_trt.reports.kernels")
    places = [ROOT / ("plugins" if name in plugins else "") / name.replace(".", "/") for name in skipped]
    assert [place for place in places if not place.is_dir() and not place.with_suffix(".py").exists()] == []
    code = IMPORT_ALL.format(blocked=NOT_CORE, skipped=skipped)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "plugins")))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


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
