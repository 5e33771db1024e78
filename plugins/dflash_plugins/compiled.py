"""Compiled kernels, and the file of a bundle with those between passes. Whoever runs it needs no compiler for them."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.kernel_specs import ROUND_TARGET, SHARED_BYTES, Use, fill_tokens
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.files.reading import read_object

FILE = "kernels.json"
TESTED = (3, 6), (3, 10)  # versions of Triton: from the first on, before the second
_MOST_BYTES = 16 << 20  # the kernels for a vocabulary of 201,088 tokens have 0.7 MB


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel with everything that a launch needs, and what it takes of a multiprocessor."""

    name: str
    ptx: str
    threads: int
    shared_bytes: int
    registers: int  # of a thread
    spill_bytes: int  # of registers that a thread stores in memory
    parameters: tuple[str, ...]  # the names of the arguments that are not constants, in order

    @property
    def stores(self) -> bool:
        """Whether the kernel writes anything. Triton 3.7.1 compiles a tile of MoEGateUp for sm_100 to nothing."""
        return "st.global" in self.ptx

    @property
    def fits(self) -> bool:
        """Whether a launch can hold it, and its numbers stay in registers. This depends on Triton's version."""
        return self.stores and self.shared_bytes <= SHARED_BYTES and not self.spill_bytes


def from_json(fields: dict[str, Any]) -> Compiled:
    """The kernel that was written with `dataclasses.asdict`."""
    return Compiled(**fields | {"parameters": tuple(fields["parameters"])})


def no_compiler() -> str | None:
    """Why no kernel can be compiled here: Triton is missing or broken. None if it can be imported."""
    try:
        importlib.import_module("dflash_plugins.compiler")
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
    from dflash_plugins.compiler import try_one

    try:
        try_one(fill_tokens(1))
    except BuildError as error:
        return str(error)
    return None


def compile_round(wanted: Sequence[Use]) -> dict[str, Compiled]:
    """The kernels by the digests of their uses, for any GPU. Raises BuildError if one cannot be made, or does not fit a
    launch.
    """
    if reason := no_compiler():
        raise BuildError(reason)
    from dflash_plugins.compiler import compile_kernel

    made = {use.digest: compile_kernel(use, ROUND_TARGET) for use in wanted}
    if wrong := [kernel for kernel in made.values() if not kernel.fits]:
        raise BuildError(
            f"{wrong[0].name} writes nothing, spills registers or takes more than {SHARED_BYTES} bytes of shared "
            "memory; install another version of Triton"
        )
    return made


def write(file: Path, kernels: dict[str, Compiled]) -> None:
    """Write kernels, by the digests of their uses, as `read` reads them."""
    file.write_text(json.dumps({digest: asdict(kernel) for digest, kernel in kernels.items()}, indent=1))


def read(file: Path) -> dict[str, Compiled]:
    """What `write` wrote. Raises BundleError."""
    kernels = read_object(file, _MOST_BYTES, BundleError)
    try:
        return {digest: from_json(fields) for digest, fields in kernels.items()}
    except (KeyError, TypeError) as error:
        raise BundleError(f"{file}: holds no compiled kernels: {error}") from error
