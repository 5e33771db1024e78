"""Corrections of Triton's interpreter, in which conftest.py runs kernels, and tensors as arrays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from dflash_plugins.kernel_specs import Use
from dflash_plugins.launch import by_triton
from triton import language as tl
from triton.runtime import interpreter

_convert_float = interpreter._convert_float


_NEAREST: dict[Any, tuple[Any, Any]] = {
    tl.bfloat16: (ml_dtypes.bfloat16, np.uint16),
    tl.float8e4nv: (ml_dtypes.float8_e4m3fn, np.uint8),
}


def _rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
    """The interpreter truncates float32 to bfloat16, and has no ties in E4M3. The instructions on a GPU round to
    nearest, ties to even.
    """
    if source == tl.float32 and target in _NEAREST:
        kind, bits = _NEAREST[target]
        return data.astype(kind).view(bits)
    return _convert_float(data, source, target, mode)


interpreter._convert_float = _rounded

_create_dot = interpreter.InterpreterBuilder.create_dot


def _create_exact_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """The interpreter keeps bfloat16 as its bits, and would multiply these. Its products in float32 are added in an
    order that depends on the number of columns; in float64 that is not seen.
    """
    wide = [x.data.view(ml_dtypes.bfloat16) if x.dtype == tl.bfloat16 else x.data for x in (a, b)]
    if d.dtype != tl.float32:
        return _create_dot(self, a, b, d, *rest)
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.matmul(*(x.astype(np.float64) for x in wide)).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, tl.float32)


interpreter.InterpreterBuilder.create_dot = _create_exact_dot


_patch_lang = interpreter._patch_lang
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a kernel. The interpreter would replace all of the language again before each such call,
    which took half of the time.
    """
    return self.rewrite()(*args, **kwargs)


interpreter._patch_lang = lambda kernel: _patch_lang(_LANGUAGE)
interpreter.InterpretedFunction.__call__ = _call


class _Results(list[Any]):
    """The results of one instruction, as the compiler's builder returns them."""

    def get_result(self, i: int) -> Any:
        return self[i]


def _shifted(count: int, value: Any) -> Any:
    return value << np.uint32(count) if count >= 0 else value >> np.uint32(-count)


def _selected(value: Any, selector: int) -> Any:
    """`prmt` of a register and 0: a byte of the register for each place, or 0 from number 4 on."""
    places = [selector >> 4 * i & 0xF for i in range(4)]
    of_zero = np.zeros((len(value), 4), np.uint8)
    taken = np.concatenate((value[:, None].view(np.uint8), of_zero), 1)[:, places]
    return np.ascontiguousarray(taken).view(np.uint32)[:, 0]


BITWISE = {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor}


def _create_inline_asm(
    self: Any, text: str, constraints: str, inputs: Any, types: Any, pure: bool, pack: int
) -> Any:
    """Execute PTX: the few instructions that kernels use, on `pack` elements at a time."""
    shape = inputs[0].data.shape
    registers: dict[str, Any] = {}
    written = constraints.count("=")
    for i, tensor in enumerate(inputs):
        packed = np.ascontiguousarray(tensor.data).reshape(-1, pack).view(np.uint32)
        assert packed.shape[1] == 1  # one register for each operand
        registers[f"${written + i}"] = packed[:, 0]
    for line in text.replace("{", "").replace("}", "").split(";"):
        words = line.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        name, target, *operands = words
        values = [registers[o] if o in registers else np.uint32(int(o, 0)) for o in operands]
        if name == "mov.b32":
            registers[target] = np.full_like(registers[f"${written}"], values[0])
            continue
        a, b = values[:2]
        if name in ("shl.b32", "shr.u32"):
            registers[target] = _shifted(int(b) if name == "shl.b32" else -int(b), a)
        elif name == "prmt.b32":
            registers[target] = _selected(a, int(values[2]))
        elif name in BITWISE:
            registers[target] = BITWISE[name](a, b)
        else:
            kind = {"fma.rn.bf16x2": ml_dtypes.bfloat16, "fma.rn.f16x2": np.float16}[name]
            x, y, z = (np.ascontiguousarray(value).view(kind).astype(np.float64) for value in values)
            with np.errstate(over="ignore"):
                registers[target] = (x * y + z).astype(np.float32).astype(kind).view(np.uint32)
    results = _Results()
    several = written // len(types)  # registers of a result
    for i, kind in enumerate(types):
        parts = [registers[f"${several * i + j}"].view(np.uint16).reshape(-1, 2) for j in range(several)]
        numbers = np.concatenate(parts, 1).reshape(shape)
        scalar = kind.scalar
        results.append(interpreter.TensorHandle(numbers.view(interpreter._get_np_dtype(scalar)), scalar))
    return results


interpreter.InterpreterBuilder.create_inline_asm = _create_inline_asm


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as an array. bfloat16 becomes ml_dtypes' type."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


class Unrounded:
    """Launches kernels, and keeps in float32 the sums that they round to 16 bits, which hides most other orders."""

    def __init__(self) -> None:
        self.kept = list[torch.Tensor]()

    def __call__(self, use: Use, grid: tuple[int, ...], **arguments: Any) -> None:
        if use.function not in ("product", "merge", "combine"):
            by_triton(use, grid, **arguments)
            return
        y = arguments["y"]
        self.kept.append(torch.empty_like(y, dtype=torch.float32))
        by_triton(use, grid, **arguments | {"y": self.kept[-1]})
        y.copy_(self.kept[-1])


def unrounded(function: Callable[..., Any], *given: Any, **options: Any) -> torch.Tensor:
    """What a launch gives, before it is rounded."""
    run = Unrounded()
    function(*given, **options, run=run)
    return torch.cat(run.kept)
