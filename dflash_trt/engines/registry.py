"""The one table of engines. An entry is imported when it is asked for, so that no other engine's packages are."""

from __future__ import annotations

import importlib
from typing import cast

from dflash_trt.engines.base import Engine
from dflash_trt.errors import BuildError

# Engine -> the module whose `entry(name)` gives it.
_MODULES = {
    "onnxruntime": "dflash_trt.engines.onnxruntime_build",
    "tensorrt-rtx": "dflash_trt.engines.tensorrt.build",
    "tensorrt": "dflash_trt.engines.tensorrt.build",
    "tensorrt-llm": "dflash_trt.trtllm.build",
}
NAMES = tuple(_MODULES)
DEFAULT = "onnxruntime"


def find(name: str) -> Engine:
    """The engine of that name. Raises BuildError where there is none."""
    if name not in _MODULES:
        raise BuildError(f"--engine is {name!r}, this version builds for: {', '.join(NAMES)}")
    return cast(Engine, importlib.import_module(_MODULES[name]).entry(name))
