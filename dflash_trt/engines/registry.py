"""The one table of engines. An entry is imported when it is asked for, and imports its packages when it is used."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, cast

from dflash_trt.engines.base import EngineEntry, EngineOptions
from dflash_trt.errors import BundleError, UsageError, did_you_mean, show

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle

# Engine -> the module whose `entry(name)` returns its entry.
_MODULES = {
    "onnxruntime": "dflash_trt.engines.onnxruntime.entry",
    "torch": "dflash_trt.engines.torch.entry",
    "tensorrt-rtx": "dflash_trt.engines.tensorrt.entry",
    "tensorrt": "dflash_trt.engines.tensorrt.entry",
    "tensorrt-llm": "dflash_trt.trtllm.entry",
}
NAMES = tuple(_MODULES)
DEFAULT = "onnxruntime"
# What other engines are compared with on a GPU, in float32.
GPU_REFERENCE = "torch"


@cache
def find(name: str) -> EngineEntry:
    """The engine with this name. Raises BuildError if there is none."""
    if name not in _MODULES:
        raise UsageError(
            f"--engine is {name!r}{did_you_mean(name, NAMES)}, expected one of: {', '.join(NAMES)}"
        )
    return cast(EngineEntry, importlib.import_module(_MODULES[name]).entry(name))


def engine_of(bundle: Bundle) -> EngineEntry:
    """The engine that a bundle was built for. Raises BundleError where this version has no such engine."""
    name = bundle.manifest["engine"]
    if name not in _MODULES:
        raise BundleError(
            f"{bundle.path}: engine is {show(name)}, this version of dflash-trt has: {', '.join(NAMES)}"
        )
    return find(name)


def engines() -> list[EngineEntry]:
    """Every engine."""
    return [find(name) for name in NAMES]


def names_by_options() -> dict[type[EngineOptions], list[str]]:
    """The kinds of options that engines have of their own, and the names of the engines that take them."""
    names: dict[type[EngineOptions], list[str]] = {}
    for engine in engines():
        if engine.options is not None:
            names.setdefault(engine.options, []).append(engine.name)
    return names
