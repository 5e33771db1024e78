"""Versions, processor and GPUs of this machine, and the engines that it can build and run."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from dflash_plugins import compiled

from dflash_trt import hardware
from dflash_trt.engines.registry import DEFAULT, engines, find
from dflash_trt.errors import DFlashError

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
    available = {engine.name: engine.availability(missing, capabilities) for engine in engines()}
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
        "engines": [{"engine": name, **asdict(each)} for name, each in available.items()],
    }


def kernels() -> dict[str, Any]:
    """Triton's version, whether tests cover it, and why builds cannot compile kernels here: from trying a small one."""
    triton = versions_of(["triton"])["triton"]
    return {
        "triton": triton,
        "tested": triton is not None and compiled.tested(triton),
        "problem": compiled.trial(),
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


_SIZES = {"vocab": 151_936, "features": 5 * 4096}  # those of Qwen3-8B
_SMALL = {"vocab": 300, "features": 128}
_COPIED = 1 << 30


def check_kernels(found: Callable[[str, str, str], None] = lambda *_: None) -> dict[str, Any]:
    """Compare each kernel with its reference on torch's GPU, or on the CPU in Triton's interpreter.

    Returns `gpu` (its name; None in the interpreter), `versions`, `copy_gb_per_s` (bytes read and written by a copy,
    what a pass could reach) and `problems` by dtype and operator, empty where its numbers are right. `found` is told a
    dtype, an operator and its problem as soon as it is known.

    Raises DFlashError where torch sees no GPU, and kernels are not interpreted.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise DFlashError(
            f"torch {torch.__version__} sees no GPU here; see what nvidia-smi and `dflash-trt doctor` say"
        )
    device, sizes = ("cuda", _SIZES) if on_gpu else ("cpu", _SMALL)
    problems = {}
    # The interpreter rounds BF16 in its own way.
    for dtype in (torch.bfloat16, torch.float16) if on_gpu else (torch.float16,):
        name, of_dtype = str(dtype).removeprefix("torch."), dict[str, str]()
        try:
            from dflash_plugins import launch

            from dflash_trt.engines.device.kernels import kernels_here
            from dflash_trt.engines.torch import checks

            run = kernels_here({}) if on_gpu else launch.by_triton
            # The interpreter lacks the assembly of the kernels in plans.
            asked: dict[str, Any] = {**sizes, "dtype": dtype, "block_size": 8, "of_layers": on_gpu}
            for operator, problem in checks.problems(device, run, **asked):
                of_dtype[operator] = problem
                found(name, operator, problem)
        except Exception as error:  # of the compiler or the driver, or without Triton
            of_dtype["all"] = f"{type(error).__name__}: {error}"
        problems[name] = of_dtype
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "versions": versions_of(("torch", "triton")),
        "copy_gb_per_s": _copy(torch) if on_gpu else None,
        "problems": problems,
    }


def _copy(torch: Any) -> int:
    source = torch.zeros(_COPIED, dtype=torch.uint8, device="cuda")
    target, times = torch.empty_like(source), []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return int(2 * _COPIED / sorted(times)[len(times) // 2] / 1e6)  # bytes per ms
