"""The machine: its processor, memory and GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path


def processor() -> str:
    """The processor's name, its instructions for products, and the number of cores this process may use."""
    return f"{processor_kind()}, {cores()} cores"


def processor_kind() -> str:
    """The model of the processor, with its instructions for products."""
    known = instructions()
    return f"{processor_name()} ({known})" if known else processor_name()


def cores() -> int | None:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _cpuinfo(field: str) -> list[str]:
    """What Linux says of each core; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(field)]


def processor_name() -> str:
    """The model of the processor."""
    return next(iter(_cpuinfo("model name")), "") or platform.processor() or platform.machine()


def _flags() -> set[str]:
    return set(next(iter(_cpuinfo("flags")), "").split())


def instructions() -> str | None:
    """The instructions for products of floats and of bytes on x86, such as "AVX2" or "AVX-512, VNNI, AMX".

    By what Linux says; None on other systems.
    """
    flags = _flags()
    wide = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else None
    vnni, amx = flags & {"avx512_vnni", "avx_vnni"}, "amx_int8" in flags
    return ", ".join(filter(None, [wide, "VNNI" if vnni else None, "AMX" if amx else None])) or None


def has_amx_int8() -> bool:
    """Whether the processor multiplies tiles of bytes (AMX-INT8), by what Linux says; False on other systems."""
    return "amx_int8" in _flags()


def memory_bytes() -> int | None:
    """The memory of the machine; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def compute_capabilities() -> list[int]:
    """The compute capabilities of the GPUs that nvidia-smi shows; 120 is 12.0."""
    numbers = (gpu.get("compute_cap", "").replace(".", "") for gpu in gpus())
    return [int(number) for number in numbers if number.isdigit()]


def gpus() -> list[dict[str, str]]:
    """The GPUs that nvidia-smi reports, of those that CUDA_VISIBLE_DEVICES shows in its order; empty if it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = ("name", "compute_cap", "memory.total", "driver_version", "uuid")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = [
        dict(zip(fields, map(str.strip, line.split(",")), strict=False))
        for line in answer.splitlines()
        if line
    ]
    ids = [gpu.pop("uuid", "") for gpu in found]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or visible.startswith("MIG-"):  # a part of a GPU, which is none of these ids
        return found
    shown = list[dict[str, str]]()
    for name in map(str.strip, visible.split(",")):
        places = [
            i
            for i, uuid in enumerate(ids)
            if name == str(i) or (name[:4] == "GPU-" and uuid.startswith(name))
        ]
        if len(places) != 1:  # as CUDA does: those before an unknown one are there
            break
        shown.append(found[places[0]])
    return shown
