"""Ahead-of-time compilation of kernels to PTX, without a GPU. Results are cached by a digest of their inputs. Triton is
imported when a kernel is compiled, and may be missing until then.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dflash_plugins.compiled import Compiled, from_json
from dflash_plugins.kernel_specs import PTX_VERSION, ROUND_TARGET, SHARED_BYTES, TARGETS, Use, fill_tokens
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import cache_folder
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
Made = TypeVar("Made")
TESTED = (3, 6), (3, 10)  # versions of Triton: from the first on, before the second
# Triton adds two undeclared pointers to the end of an entry: scratch memory of the program and of its profiler.
_HIDDEN_PARAMETERS = 2
_RECORD = 2  # increment when the fields of Compiled change


def no_compiler() -> str | None:
    """Why no kernel can be compiled here: Triton is missing or broken. None if it can be imported."""
    try:
        for name in ("triton", "triton.compiler", "triton.backends.nvidia.compiler"):
            importlib.import_module(name)
    except Exception as error:  # a library that it loads may be missing
        return f"Triton, the compiler of kernels, cannot be imported: {type(error).__name__}: {error}"
    return None


def tested(version: str) -> bool:
    """Whether the tests of this package cover a version of Triton."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    return TESTED[0] <= numbers < TESTED[1]


def trial() -> str | None:
    """Why a small kernel cannot be compiled here. None if it can. Leaves no files."""
    if reason := no_compiler():
        return reason
    try:
        _checked(fill_tokens(1), ROUND_TARGET)
    except BuildError as error:
        return str(error)
    return None


def compile_round(wanted: Sequence[Use]) -> dict[str, Compiled]:
    """The kernels by the digests of their uses, for any GPU. Raises BuildError if one cannot be made, or does not fit a
    launch.
    """
    if reason := no_compiler():
        raise BuildError(reason)
    kernels = {use.digest: compile_kernel(use, ROUND_TARGET) for use in wanted}
    if wrong := [kernel for kernel in kernels.values() if not kernel.fits]:
        raise BuildError(
            f"{wrong[0].name} writes nothing, spills registers or takes more than {SHARED_BYTES} bytes of shared "
            "memory; install another version of Triton"
        )
    return kernels


def compile_kernel(use: Use, capability: int) -> Compiled:
    """PTX of a kernel for sm_80, sm_89, sm_90a, sm_100a or sm_120a, from the cache if possible.

    The cache is $DFLASH_KERNEL_CACHE, by default the folder `kernels` of DFLASH_TRT_CACHE. Needs neither a GPU nor a C
    compiler, because Triton's wheel has ptxas.

    Raises BuildError if the target is another one, if Triton fails, or if the kernel needs scratch memory, which a
    TensorRT plugin lacks.
    """
    if capability not in (ROUND_TARGET, *TARGETS):
        raise BuildError(
            f"plugins are compiled for sm_{', sm_'.join(map(str, TARGETS))}, not sm_{capability}"
        )
    what = [use.digest, capability, _RECORD]
    return kept(use.function, what, lambda: _checked(use, capability), asdict, from_json)


def kept(
    name: str,
    what: Sequence[Any],
    make: Callable[[], Made],
    written: Callable[[Made], Any],
    read: Callable[[Any], Made],
) -> Made:
    """What `make` gave before for the same `what`, with this compiler and these sources: from the cache, where it is
    kept as `written` gives it for JSON, and `read` takes it.
    """
    import triton

    key = hashlib.sha256(json.dumps([*what, triton.__version__, source_digest()]).encode())
    file = _cache() / f"{name}-{key.hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # it is not there, or damaged
        return read(json.loads(file.read_text()))
    result = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # others may write the same now
            partial = Path(folder) / file.name
            partial.write_text(json.dumps(written(result)))
            partial.replace(file)
    except OSError as error:
        warn_once(
            _log,
            f"{file.parent}: compiled kernels cannot be kept there ({error.strerror}), so each process compiles them "
            "anew; set DFLASH_KERNEL_CACHE to a directory that can be written",
        )
    return result


def architecture(capability: int) -> str:
    """The assembler's name of a target. From sm_90 on, "a" adds instructions that no other target has."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


@cache
def source_digest() -> str:
    """sha256 over the sources of the kernels: kernels/ and the constants of the host's noise and weights."""
    root = Path(__file__).resolve().parent
    sampling = importlib.import_module("dflash_trt.decoding.sampling").__path__[0]
    files = sorted((root / "kernels").glob("*.py"))
    files += [Path(sampling) / name for name in ("philox.py", "probability_mass.py")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, from assembling the PTX with Triton's own ptxas."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"-arch={architecture(capability)}", str(source)]
        report = subprocess.run(
            [*command, "-o", str(source.with_suffix(".cubin"))], capture_output=True, text=True
        )
    if report.returncode:
        raise BuildError(f"ptxas refused it: {report.stderr.strip()}")
    registers, spills = (
        int(re.findall(pattern, report.stderr)[0])
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    return registers, spills


def _cache() -> Path:
    folder = os.environ.get("DFLASH_KERNEL_CACHE")
    return Path(folder) if folder else cache_folder() / "kernels"


def _checked(use: Use, capability: int) -> Compiled:
    import triton
    from triton import knobs

    try:
        with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
            knobs.cache.dir = folder  # Triton's own cache would hold everything a second time
            return _compile(use, capability)
    except Exception as error:  # of Triton, LLVM or ptxas
        raise BuildError(
            f"Triton {triton.__version__} cannot compile {use.function} for {architecture(capability)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _compile(use: Use, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"{__package__}.kernels.{use.module}"), use.function)
    if not isinstance(kernel, triton.JITFunction):
        raise BuildError("TRITON_INTERPRET is set, so kernels are interpreted in this process; unset it")
    signature = {name: use.types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [["tt.divisibility", 16]]  # as allocated by TensorRT and PyTorch
    attributes: dict[tuple[int, ...], Any] = {}
    for i, kind in enumerate(signature.values()):
        if isinstance(kind, tuple):
            attributes |= {(i, j): aligned for j in range(len(kind))}
        elif kind.startswith("*"):
            attributes[(i,)] = aligned
    source = ASTSource(fn=kernel, signature=signature, constexprs=use.constants, attrs=attributes)
    options = use.options | {"ptx_version": PTX_VERSION}  # Triton's default is its newest
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise BuildError(f"it needs {meta.global_scratch_size} bytes of scratch memory")
    ptx = _without_hidden_parameters(compiled.asm["ptx"], meta.name)
    registers, spill_bytes = resources(ptx, capability)
    return Compiled(
        name=meta.name,
        ptx=ptx,
        threads=meta.num_warps * 32,
        shared_bytes=meta.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        parameters=tuple(name for name in kernel.arg_names if name in use.types),
    )


def _without_hidden_parameters(ptx: str, name: str) -> str:
    """The entry with its declared parameters only. A launch passes no others."""
    head, opening, rest = ptx.partition(f".entry {name}(")
    parameters, closing, body = rest.partition("\n)")
    declared = parameters.split(",")
    hidden = [re.findall(r"\w+_param_\d+", parameter)[-1] for parameter in declared[-_HIDDEN_PARAMETERS:]]
    if not opening or not closing or any(re.search(rf"\b{used}\b", body) for used in hidden):
        raise BuildError("its entry has an unknown form")
    return head + opening + ",".join(declared[:-_HIDDEN_PARAMETERS]) + closing + body
