"""The kernels of this project alone: torch and Triton are enough, and no bundle is opened."""

from __future__ import annotations

import os
from typing import Any

from dflash_trt.errors import DFlashError
from dflash_trt.reports.environment import versions_of

_SIZES = {"vocab": 151_936, "features": 5 * 4096}  # those of Qwen3-8B
_SMALL = {"vocab": 300, "features": 128}
_COPIED = 1 << 30


def check_kernels() -> dict[str, Any]:
    """Compare each kernel with its reference on torch's GPU, or on the CPU in Triton's interpreter.

    Returns `gpu` (its name; None in the interpreter), `versions`, `copy_gb_per_s` (bytes read and written by a copy,
    what a pass could reach) and `problems` by dtype and operator, empty where its numbers are right.

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
    for dtype in (
        (torch.bfloat16, torch.float16) if on_gpu else (torch.float16,)
    ):  # it rounds BF16 in its own way
        try:
            from dflash_plugins import launch

            from dflash_trt.engines.device.kernels import kernels_here
            from dflash_trt.engines.torch import checks

            # The interpreter lacks the assembly of the kernels in plans.
            found = checks.problems(
                device,
                kernels_here({}) if on_gpu else launch.by_triton,
                **sizes,
                dtype=dtype,
                block_size=8,
                of_layers=on_gpu,
            )
        except Exception as error:  # of the compiler or the driver, or without Triton
            found = {"all": f"{type(error).__name__}: {error}"}
        problems[str(dtype).removeprefix("torch.")] = found
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
