"""Versions, processor and GPUs of this machine, and the engines that it can build and run."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from dflash_plugins import compiler

from dflash_trt import hardware
from dflash_trt.engines.registry import DEFAULT, availability, engines, find

REQUIRED = (
    *("numpy", "ml_dtypes", "onnx", "onnx_ir", *find(DEFAULT).modules, "tokenizers", "jinja2"),
    *("huggingface_hub", "filelock", "rich", "yaml"),
)
_OTHERS = ("torch", "transformers", "safetensors", "tritonclient")


def optional() -> list[str]:
    """Modules that the core does without: those that engines can use, and a few more."""
    modules = [module for engine in engines() for module in engine.modules]
    return [name for name in dict.fromkeys((*_OTHERS, *modules)) if name not in REQUIRED]


def describe() -> dict[str, Any]:
    """Everything that a bug report needs, as plain JSON values. Imports nothing heavier than onnxruntime."""
    versions = versions_of(("dflash_trt", *REQUIRED, *optional()))
    missing = [name for name in REQUIRED if versions[name] is None]
    providers = list[str]()
    if versions["onnxruntime"]:
        import onnxruntime

        providers = list(onnxruntime.get_available_providers())
    capabilities = hardware.compute_capabilities()
    available = availability(missing, capabilities)
    return {
        "python": platform.python_version(),
        "dflash_trt": versions["dflash_trt"],
        "required": {name: versions[name] for name in REQUIRED},
        "optional": {name: versions[name] for name in optional()},
        "system": platform.platform(),
        "cpu": hardware.processor_kind(),
        "cores": hardware.cores(),
        "memory_bytes": hardware.memory_bytes(),
        "gpus": hardware.gpus(),
        "onnxruntime_providers": providers,
        "missing": missing,
        "engines": [{"engine": name, **asdict(state)} for name, state in available.items()],
    }


def kernels() -> dict[str, Any]:
    """Triton's version, whether tests cover it, and why builds cannot compile kernels here: from trying a small one."""
    triton = versions_of(["triton"])["triton"]
    return {
        "triton": triton,
        "tested": triton is not None and compiler.tested(triton),
        "problem": compiler.trial(),
    }


def versions_of(modules: Iterable[str]) -> dict[str, str | None]:
    """The installed version of the distribution that provides each module; None if the module is missing."""
    distributions = metadata.packages_distributions()
    return {name: _version(name, distributions) for name in modules}


def _version(module: str, distributions: Mapping[str, list[str]]) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(distributions.get(module, [module])[0])
    except metadata.PackageNotFoundError:
        return "not installed, run from its source"
