"""Versions, processor and GPUs of this machine, and the engines that it can build and run."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from dflash_trt import hardware
from dflash_trt.engines.tensorrt.flavour import FLAVOURS

REQUIRED = (
    "numpy",
    "ml_dtypes",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "rich",
    "yaml",
)
OPTIONAL = (
    "torch",
    "transformers",
    "safetensors",
    "tensorrt",
    "tensorrt_rtx",
    "tensorrt_llm",
    "jsonschema",
    "triton",
    "tritonclient",
)


def describe() -> dict[str, Any]:
    """Everything that a bug report needs, as plain JSON values. Imports nothing heavier than onnxruntime."""
    distributions = metadata.packages_distributions()
    versions = {name: _version(name, distributions) for name in ("dflash_trt", *REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if versions[name] is None]
    return {
        "python": platform.python_version(),
        "dflash_trt": versions["dflash_trt"],
        "required": {name: versions[name] for name in REQUIRED},
        "optional": {name: versions[name] for name in OPTIONAL},
        "system": platform.platform(),
        "cpu": hardware.processor_name(),
        "cores": hardware.cores(),
        "memory_bytes": hardware.memory_bytes(),
        "gpus": hardware.gpus(),
        "onnxruntime_providers": _providers() if versions["onnxruntime"] else [],
        "missing": missing,
        "engines": _engines(missing),
    }


def _engines(missing: list[str]) -> list[dict[str, Any]]:
    ready = not missing
    note = "on the CPU" if ready else f"install {', '.join(missing)}"
    rows = [{"engine": "onnxruntime", "build": ready, "run": ready, "note": note}]
    present = hardware.compute_capabilities()
    for flavour in FLAVOURS.values():
        there = importlib.util.find_spec(flavour.module) is not None
        here = [capability for capability in present if capability in flavour.capabilities]
        absent = [] if there else [flavour.module]
        if importlib.util.find_spec("torch") is None:
            absent.append("torch, to run")
        serves = f"for compute capability {', '.join(map(str, flavour.capabilities))}"
        rows.append(
            {
                "engine": flavour.name,
                "build": ready and there and (flavour.ahead or bool(here)),
                "run": ready and not absent and bool(here),
                "note": "; ".join([serves, *([f"install {', '.join(absent)}"] if absent else [])]),
            }
        )
    schemas, package = (importlib.util.find_spec(name) is not None for name in ("jsonschema", "tensorrt_llm"))
    lacks = {"jsonschema, to build": schemas, "tensorrt_llm, to run": package}
    note = ", ".join(name for name, there in lacks.items() if not there)
    rows.append(
        {
            "engine": "tensorrt-llm",
            "build": ready and schemas,
            "run": ready and package,
            "note": f"install {note}" if note else "",
        }
    )
    return rows


def _version(module: str, distributions: Mapping[str, list[str]]) -> str | None:
    """The installed version of the distribution that provides a module; None if the module is missing."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return metadata.version(distributions.get(module, [module])[0])
    except metadata.PackageNotFoundError:
        return "not installed, run from its source"


def _providers() -> list[str]:
    import onnxruntime

    return list(onnxruntime.get_available_providers())
