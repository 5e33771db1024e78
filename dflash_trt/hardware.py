"""The machine: its processor, memory and GPUs."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dflash_trt.extras import install

# The oldest driver for CUDA 13, which torch and TensorRT take from PyPI, and for a torch that takes CUDA 12.8
# (docs/guides/gpu.md has the sources). That torch is also the last one with code for 7.0, and none has any for older
# GPUs (torch's RELEASE.md).
DRIVER = 580
_OLD_DRIVER, _OLD_TORCH = 525, "torch==2.10.*"
_ASK_TORCH = "import json, torch; from dflash_trt import hardware; print(json.dumps(hardware.said_by(torch)))"


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


def give_back_memory() -> None:
    """Give the memory that this process has freed back to the system, as glibc does not by itself."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def compute_capabilities() -> list[int]:
    """The compute capabilities of the GPUs that nvidia-smi shows; 120 is 12.0."""
    numbers = (gpu.get("compute_cap", "").replace(".", "") for gpu in gpus())
    return [int(number) for number in numbers if number.isdigit()]


def number_gpus_by_bus() -> None:
    """Let CUDA number the GPUs as nvidia-smi does, unless the user has set another order. By itself CUDA has the
    fastest first, which could be another GPU than the one that a bundle was built for.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def gpus() -> list[dict[str, str]]:
    """The GPUs that nvidia-smi reports, of those that CUDA_VISIBLE_DEVICES shows in its order; empty if it fails."""
    number_gpus_by_bus()
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


class Torch(NamedTuple):
    """What torch says of itself and of the GPUs here.

    version: empty where it cannot be imported. cuda: the version of CUDA that it is for; None if it is for the CPU.
    gpus: the names of those that it can use. said: its own words where there are none. lacks: the compute capability of
    the first one if it has no code for that, else 0.
    """

    version: str
    cuda: str | None
    gpus: tuple[str, ...]
    problem: str = ""
    lacks: int = 0


def torch_here() -> Torch | None:
    """What torch says; None where it is not installed. A process that has not imported it asks another one, because an
    import takes seconds, and a process that has asked CUDA can no longer fork.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    return Torch(*said_by(sys.modules["torch"])) if "torch" in sys.modules else _asked()


@cache
def _asked() -> Torch:
    try:
        command = [sys.executable, "-c", _ASK_TORCH]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        return Torch(*json.loads(done.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return Torch("", None, (), lines[-1] if lines else f"exit code {error.returncode}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch("", None, (), str(error))


def said_by(torch: Any) -> tuple[str, str | None, tuple[str, ...], str, int]:
    """The fields of `Torch`, of the module. Its reasons are warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        lacks = torch_lacks(torch) if count else 0
    names = () if lacks else tuple(torch.cuda.get_device_name(i) for i in range(count))
    text = " ".join(str(warning.message) for warning in warned)
    return str(torch.__version__), torch.version.cuda, names, text, lacks


def torch_lacks(torch: Any) -> int:
    """The compute capability of the first GPU if torch was compiled without code that runs on it, else 0.

    A GPU runs code for its own major version and no later minor one, and compiles PTX for any earlier version.
    """
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    codes = [re.fullmatch(r"(sm|compute)_(\d+)[af]?", code) for code in torch.cuda.get_arch_list()]
    known = [(found[1], int(found[2])) for found in codes if found]
    runs = any(code <= here and (kind == "compute" or code // 10 == major) for kind, code in known)
    return 0 if runs or not known else here


def driver() -> int | None:
    """The first number of the driver's version, such as 580; None if nvidia-smi shows none."""
    number = next(iter(gpus()), {}).get("driver_version", "").partition(".")[0]
    return int(number) if number.isdigit() else None


def torch_problem() -> str:
    """Why the torch that is installed runs nothing on the GPU here, with the command that mends it.

    Empty if it does, if no GPU is here, and where torch is not installed.
    """
    if not gpus() or (torch := torch_here()) is None or torch.gpus:
        return ""
    number = driver() or DRIVER
    command = install("torch") if number >= DRIVER else f"pip install '{_OLD_TORCH}'"
    if number < _OLD_DRIVER:
        return f"the driver is {number}, and torch needs {_OLD_DRIVER} or newer: update the driver"
    if not torch.version:
        return f"torch cannot be imported ({torch.problem}): pip uninstall -y torch && {command}"
    if torch.cuda is None:
        return f"torch {torch.version} has no CUDA: pip uninstall -y torch && {command}"
    if number < DRIVER and int(torch.cuda.partition(".")[0]) >= 13:
        needs = f"torch {torch.version} is for CUDA {torch.cuda}, which needs driver {DRIVER} or newer"
        return f"{needs}, and {number} is here: {command}"
    if torch.lacks:
        newest = torch.lacks >= 75 and number >= DRIVER
        command = (
            install("torch").replace("install", "install --upgrade", 1)
            if newest
            else f"pip install '{_OLD_TORCH}'"
        )
        way = f": {command}" if torch.lacks >= 70 else "; --engine onnxruntime runs on the CPU"
        return f"torch {torch.version} has no code for compute capability {torch.lacks / 10}{way}"
    return (
        f"torch {torch.version} for CUDA {torch.cuda} sees no GPU: {torch.problem or 'it does not say why'}"
    )
