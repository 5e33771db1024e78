"""What an installation needs: the core runs with its declared dependencies alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    blocked = ("torch", "transformers", "safetensors", "hypothesis", "pytest", "jsonschema", "triton")
    # What runs on a GPU needs torch, and what compiles kernels needs triton; the rest of the package neither.
    plugins = [f"dflash_trt.plugins.{name}" for name in ("kernels.", "launch", "moe", "compiler", "rounds")]
    engines = [f"dflash_trt.engines.tensorrt.{name}" for name in ("engine", "pair")]
    code = IMPORT_ALL.format(blocked=blocked, on_gpus=(*plugins, *engines))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
