"""Launch compiled kernels through CUDA's driver, on memory and a stream that someone else owns."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from dflash_trt.errors import DFlashError

_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEFAULT_SHARED = 48 << 10  # what a launch may have without it


class Kernel(Protocol):
    """`threads` of a program, and its shared memory in bytes."""

    @property
    def name(self) -> str: ...
    @property
    def ptx(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


class Driver:
    """Functions of the driver's library, and the kernels that it has loaded, by context."""

    def __init__(self, library: Any) -> None:
        self._cuda = library
        self._loaded: dict[tuple[int | None, str, str], ctypes.c_void_p] = {}

    @staticmethod
    @cache
    def get() -> Driver:
        """The driver of this machine. Raises DFlashError if there is none."""
        try:
            return Driver(ctypes.CDLL("libcuda.so.1"))
        except OSError as error:
            raise DFlashError(f"CUDA's driver cannot be loaded: {error}") from None

    def prepare(self, kernel: Kernel) -> ctypes.c_void_p:
        """Load a kernel into the current context, unless it has it: a CUDA graph that is captured forbids it."""
        context = ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(context))
        key = context.value, kernel.name, kernel.ptx
        if key not in self._loaded:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._check("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(kernel.ptx.encode()))
            self._check(
                "cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(kernel.name.encode())
            )
            if kernel.shared_bytes > _DEFAULT_SHARED:
                self._check("cuFuncSetAttribute", function, _MOST_SHARED, kernel.shared_bytes)
            self._loaded[key] = function
        return self._loaded[key]

    def launch(self, kernel: Kernel, grid: Sequence[int], arguments: Sequence[Any], stream: int) -> None:
        """`arguments`: ctypes values in the order of the kernel's parameters. Returns before the kernel has run."""
        function = self.prepare(kernel)
        x, y, z = (*grid, 1, 1)[:3]
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(each), ctypes.c_void_p) for each in arguments)
        )
        self._check(
            "cuLaunchKernel",
            *(function, x, y, z, kernel.threads, 1, 1, kernel.shared_bytes, ctypes.c_void_p(stream)),
            *(pointers, None),
        )

    def _check(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, name)(*arguments):
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise DFlashError(f"{name}: {(text.value or b'error').decode()} ({code})")
