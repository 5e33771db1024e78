"""Compiled kernels: the file of a bundle with those between passes, and launches through the GPU's driver. Whoever runs
them needs no compiler but the driver's own.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.kernel_specs import SHARED_BYTES, Use
from dflash_trt.errors import BuildError, BundleError, EngineError
from dflash_trt.files.reading import read_object

FILE = "kernels.json"
_MOST_BYTES = 16 << 20  # the kernels for a vocabulary of 201,088 tokens have 0.7 MB
LIBRARY = "libcuda.so.1"
_ALIGNMENT = 16  # of every pointer, which kernels are compiled for
# Whether kernels for sm_90 and later start while the one before them ends (programmatic dependent launch). Off until it
# is timed on a GPU: `build_scripts.first_gpu passes --overlap`.
OVERLAP = False
# Waits for all that earlier kernels write; then the next one may start, and wait.
_WAIT = "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\n"
# CUlaunchAttribute of cuda.h: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed.
_OVERLAPPING = ctypes.create_string_buffer(struct.pack("i4xi60x", 6, 1), 72)
# CUfunction_attribute of cuda.h: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MOST_SHARED = 8
_INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


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
        """Whether the kernel writes anything. Triton 3.7.1 compiled a tile for sm_100 to nothing."""
        return "st.global" in self.ptx

    @property
    def overlaps(self) -> bool:
        """Whether the kernel is launched before the one before it has ended."""
        return OVERLAP and int(re.findall(r"\.target sm_(\d+)", self.ptx)[0]) >= 90

    @property
    def waiting(self) -> str:
        """The PTX of a kernel that is."""
        return re.sub(r"(\.entry [^{]*\{\n)", rf"\1{_WAIT}", self.ptx, count=1)

    @property
    def fits(self) -> bool:
        """Whether a launch can hold it, and its numbers stay in registers. This depends on Triton's version."""
        return self.stores and self.shared_bytes <= SHARED_BYTES and not self.spill_bytes


def from_json(fields: dict[str, Any]) -> Compiled:
    """The kernel that was written with `dataclasses.asdict`."""
    return Compiled(**fields | {"parameters": tuple(fields["parameters"])})


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


class CudaDriver:
    """The functions of the driver's library. Raises EngineError if it is missing, or if it refuses a call."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise EngineError(f"the driver's library cannot be opened: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise EngineError(f"{name}: {(text.value or b'unknown error').decode()} (error {code})")

    def context(self) -> int | None:
        """The current context."""
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        return current.value

    def load(self, compiled: Compiled) -> ctypes.c_void_p:
        """The kernel in the current context, translated for its GPU, which may refuse the shared memory that it asks
        for.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        ptx = compiled.waiting if compiled.overlaps else compiled.ptx
        self.call("cuModuleLoadData", ctypes.byref(module), ptx.encode())
        self.call("cuModuleGetFunction", ctypes.byref(function), module, compiled.name.encode())
        if compiled.shared_bytes > SHARED_BYTES:
            self.call("cuFuncSetAttribute", function, _MOST_SHARED, compiled.shared_bytes)
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        compiled: Compiled,
        grid: Sequence[int],
        values: Sequence[Any],
        stream: int,
    ) -> None:
        """Queue a kernel. `values`: its arguments in the order of its parameters, as ctypes."""
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (*grid, *[1] * (3 - len(grid)), compiled.threads, 1, 1, compiled.shared_bytes)
        if compiled.overlaps:
            config = struct.pack(
                "7IPPI4x", *sizes, stream, ctypes.addressof(_OVERLAPPING), 1
            )  # CUlaunchConfig
            self.call("cuLaunchKernelEx", config, function, pointers, None)
            return
        self.call(
            "cuLaunchKernel", function, *map(ctypes.c_uint, sizes), ctypes.c_void_p(stream), pointers, None
        )


class Kernels:
    """Kernels in the context that torch uses. An object is called as `launch.by_triton` is.

    compiled: the kernels by the digests of their uses. Loading translates their PTX for this GPU.
    stream: the number of the stream that a launch goes to.
    compile_kernel: makes a kernel that is not among `compiled`. Without it, its launch raises EngineError. What
        could not be made is not tried again.

    Raises EngineError if the driver is missing or refuses a kernel.
    """

    def __init__(
        self,
        compiled: Mapping[str, Compiled],
        *,
        device: int,
        stream: Callable[[], int],
        compile_kernel: Callable[[Use], Compiled] | None = None,
    ) -> None:
        self._driver = CudaDriver()
        self._stream, self._compile = stream, compile_kernel
        self._context = ctypes.c_void_p()
        self._driver.call("cuInit", 0)
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._driver.call("cuCtxSetCurrent", self._context)
        self._loaded = {digest: (self._driver.load(kernel), kernel) for digest, kernel in compiled.items()}
        self._failed = dict[str, BuildError | EngineError]()

    def __call__(self, use: Use, grid: tuple[int, ...], **arguments: Any) -> None:
        """Queue a kernel. Tensors are contiguous and on the GPU; arguments that are None are constants of the kernel.

        Raises EngineError if the kernel is missing, a tensor is not aligned, or the driver refuses the kernel or the
        launch, and BuildError if the kernel cannot be compiled.
        """
        if use.digest in self._failed:
            raise self._failed[use.digest].with_traceback(None)
        if use.digest not in self._loaded:
            if self._compile is None:
                raise EngineError(f"{use.function} was not compiled for these sizes")
            try:
                kernel = self._compile(use)
                self._loaded[use.digest] = self._driver.load(kernel), kernel
            except (BuildError, EngineError) as error:
                self._failed[use.digest] = error
                raise
        function, compiled = self._loaded[use.digest]
        values: list[Any] = []
        for name in compiled.parameters:
            kinds, argument = use.types[name], arguments[name]
            several = isinstance(kinds, tuple)
            for kind, value in zip(kinds, argument, strict=True) if several else [(kinds, argument)]:
                values.append(_value(use, name, kind, value))
        self._driver.call("cuCtxSetCurrent", self._context)  # a thread that has used no torch yet has none
        self._driver.launch(function, compiled, grid, values, self._stream())


def _value(use: Use, name: str, kind: Any, value: Any) -> Any:
    """An argument as the kernel takes it: an address, or an integer."""
    if kind in _INTEGERS:
        return _INTEGERS[kind](value)
    address = value.data_ptr()
    if address % _ALIGNMENT:
        raise EngineError(f"{use.function}: {name}: address {address:#x} is not a multiple of {_ALIGNMENT}")
    return ctypes.c_void_p(address)
