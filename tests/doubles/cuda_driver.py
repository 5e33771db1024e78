"""A stand-in for the driver's library: it takes PTX that Triton compiled, and runs the kernel in Triton's interpreter.

A launch must give what the PTX declares: one value of the declared width for each parameter, and its threads.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from dflash_plugins import compiled
from dflash_plugins.kernel_specs import Use

from tests.doubles.cuda_double import Cuda

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "i64": torch.int64}
DTYPES |= {"i32": torch.int32, "u8": torch.uint8}
COMPILE = """
import json, sys
from dataclasses import asdict
from dflash_plugins import compiler, kernel_specs
wanted = json.load(sys.stdin)
for fields in wanted:
    fields["types"] = {n: tuple(each) if isinstance(each, list) else each for n, each in fields["types"].items()}
made = compiler.compile_round([kernel_specs.Use(**fields) for fields in wanted])
json.dump({digest: asdict(kernel) for digest, kernel in made.items()}, sys.stdout)
"""
USES: dict[str, Use] = {}  # by PTX


def compile_round(
    run: Callable[..., subprocess.CompletedProcess[str]], wanted: Sequence[Use]
) -> dict[str, compiled.Compiled]:
    """`compiler.compile_round` in a process that compiles kernels instead of interpreting them."""
    done = run("-c", COMPILE, input=json.dumps([asdict(use) for use in wanted]))
    assert done.returncode == 0, done.stderr
    kernels = {digest: compiled.from_json(fields) for digest, fields in json.loads(done.stdout).items()}
    USES.update({kernels[use.digest].ptx: use for use in wanted})
    return kernels


class Driver:
    """`refuses` names a function that fails."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.launches = refuses, Counter[str]()
        self._kernels: list[tuple[str, list[str], int, Use]] = []
        self._current = 0

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "refuses"):
            return lambda *_: 218
        return object.__getattribute__(self, name)

    def cuInit(self, flags: int) -> int:
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        text._obj.value = b"a PTX JIT compilation failed"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 7
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self._current = context.value or 0
        return 0

    def cuModuleLoadData(self, module: Any, image: bytes) -> int:
        text = image.decode()
        found = re.search(r"\.entry (\w+)\((.*?)\n\)", text, re.S)
        threads = re.search(r"\.reqntid (\d+)", text)
        assert found is not None
        assert threads is not None
        widths = re.findall(r"\.param \.(u\d+)", found[2])
        self._kernels.append((found[1], widths, int(threads[1]), USES[text]))
        module._obj.value = len(self._kernels)
        return 0

    def cuModuleGetFunction(self, function: Any, module: ctypes.c_void_p, name: bytes) -> int:
        assert module.value is not None
        assert self._kernels[module.value - 1][0] == name.decode()
        function._obj.value = module.value
        return 0

    def cuLaunchKernel(self, function: ctypes.c_void_p, *rest: Any) -> int:
        *sizes, stream, pointers, extra = rest
        assert function.value is not None
        assert extra is None
        assert self._current == 7, "no context is current"
        name, widths, threads, use = self._kernels[function.value - 1]
        grid, block, shared = [s.value for s in sizes[:3]], [s.value for s in sizes[3:6]], sizes[6].value
        assert block == [threads, 1, 1]
        assert shared <= 48 << 10
        assert stream.value == Cuda.current.cuda_stream
        assert len(pointers) == len(widths)
        kinds = {"u64": ctypes.c_uint64, "u32": ctypes.c_int32}
        values = iter([kinds[w].from_address(p).value for w, p in zip(widths, pointers, strict=True)])
        kernel = getattr(importlib.import_module(f"dflash_plugins.kernels.{use.module}"), use.function)
        arguments = dict[str, Any]()
        for argument in [argument for argument in kernel.arg_names if argument in use.types]:
            several = isinstance(kinds_of := use.types[argument], tuple)
            read = [_argument(next(values), kind) for kind in (kinds_of if several else [kinds_of])]
            arguments[argument] = tuple(read) if several else read[0]
        assert next(values, None) is None
        self.launches[name] += 1
        kernel[tuple(grid)](**arguments, **use.launch)
        return 0


def _argument(value: int, kind: str) -> Any:
    return _tensor(value, kind[1:]) if kind.startswith("*") else value


def _tensor(address: int, dtype: str) -> torch.Tensor:
    """The memory from an address on. It is kept until the kernel has run, as torch's allocator does on a stream."""
    running, Cuda.running = Cuda.running, True
    storage, offset = Cuda.device_memory.storage(address)
    size = DTYPES[dtype].itemsize
    tensor = torch.empty(0, dtype=DTYPES[dtype])
    tensor.set_(storage, offset // size, ((storage.nbytes() - offset) // size,))
    Cuda.running = running
    return tensor


def install(patch: Any, refuses: str = "") -> Driver:
    """The driver's library is this double. patch: pytest's MonkeyPatch."""
    driver = Driver(refuses)
    patch.setattr(compiled.ctypes, "CDLL", lambda name: driver)
    return driver
