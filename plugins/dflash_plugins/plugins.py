"""Plugins of TensorRT and TensorRT-RTX: classes in Python that launch our compiled kernels, one for each kernel.

A plan holds the PTX of its kernels, so a process that loads it needs no Triton. But it must register these classes
first, as TensorRT calls them for every launch that no CUDA graph replays. The kernels, their outputs and their grids
are those of kernel_table.py.

Written against `IPluginV3` of TensorRT 11.4 and TensorRT-RTX 1.7; `trt` is one of these modules.
"""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_plugins import kernel_specs as uses
from dflash_plugins.compiled import Compiled, CudaDriver, from_json
from dflash_plugins.kernel_table import KERNELS, Kernel
from dflash_trt.errors import BuildError, BundleError

# Increment when a plugin's inputs, outputs, fields or results change, and when the noise or weights of decoding/
# change. It is part of the plugins' names and of a bundle's manifest.
VERSION = 6
NAMESPACE = "dflash"
# Names of types in Triton -> in trt.DataType.
TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "i32": "INT32", "i64": "INT64"}
_KERNELS = "kernels"  # the field of a plan that holds compiled kernels
_loaded: dict[tuple[Any, ...], ctypes.c_void_p] = {}  # kernels by context, name and text
_creators: dict[str, list[Any]] = {}  # by module: TensorRT refers to them for as long as the process lives
# Of kernels that a plan needs: an exception in `configure_plugin` ends the process.
_failures: list[Exception] = []


def versioned(name: str) -> str:
    """The name under which a plugin is registered."""
    return f"{name}_v{VERSION}"


def check_version(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a plan whose plugins follow other rules than this version's host code. `where` names the bundle.

    Raises BundleError.
    """
    version = manifest.get("tensorrt", {}).get("plugins", {}).get("version", VERSION)
    if version != VERSION:
        raise BundleError(
            f"{where}: manifest.json tensorrt.plugins.version is {version!r}, expected {VERSION}: the plans hold "
            "kernels of another version of dflash-trt; build the bundle again"
        )


@dataclass(frozen=True)
class Build:
    """The compute capability that kernels are compiled for, and whether TensorRT times tile sizes on this machine's
    GPU. Otherwise the first ones are taken that a launch can have.
    """

    capability: int
    timed: bool


def register(trt: Any, build: Build | None = None) -> None:
    """Register all plugins, for a build, or with None for loading plans. Raises BuildError if TensorRT refuses one."""
    if trt.__name__ not in _creators:
        if trt.__name__ == "tensorrt_rtx":
            provide_library_name()
        creator = _creator_class(trt)
        created = [creator(kernel) for kernel in KERNELS]
        for new_creator in created:
            if not trt.get_plugin_registry().register_creator(new_creator, NAMESPACE):
                raise BuildError(f"{trt.__name__} {trt.__version__} refuses the plugin {new_creator.name}")
        _creators[trt.__name__] = created
    for registered in _creators[trt.__name__]:
        registered.build = build
    _failures.clear()


def check() -> None:
    """Raise what went wrong while kernels were compiled for the last plan."""
    if _failures:
        raise _failures[0]


@cache
def _driver() -> CudaDriver:
    return CudaDriver()


class _Symbol:
    """A size that a plan leaves open, with the operations of a kernel's outputs."""

    def __init__(self, trt: Any, builder: Any, size: Any) -> None:
        self._trt, self._builder, self.size = trt, builder, size

    def _with(self, operation: str, other: Any) -> _Symbol:
        size = other.size if isinstance(other, _Symbol) else self._builder.constant(int(other))
        kind = getattr(self._trt.DimensionOperation, operation)
        return _Symbol(self._trt, self._builder, self._builder.operation(kind, self.size, size))

    def __add__(self, other: Any) -> _Symbol:
        return self._with("SUM", other)

    def __mul__(self, other: Any) -> _Symbol:
        return self._with("PROD", other)

    def __floordiv__(self, other: Any) -> _Symbol:
        return self._with("FLOOR_DIV", other)

    def minimum(self, other: Any) -> _Symbol:
        return self._with("MIN", other)

    __radd__, __rmul__ = __add__, __mul__


class _Fixed(tuple[int, ...]):
    """A shape of which only those sizes can be read that the graph fixes."""

    def __getitem__(self, axis: Any) -> Any:
        if (size := super().__getitem__(axis)) < 0:
            raise BuildError(f"size {axis} of {tuple(self)} is left open, expected one that the graph fixes")
        return size


@dataclass(frozen=True)
class _Tiled:
    """A compiled kernel, as a plan holds it, and its tile sizes."""

    tile: Any
    compiled: Compiled

    def loaded(self) -> ctypes.c_void_p:
        """The kernel in the current context, which a CUDA graph that is captured cannot load."""
        key = _driver().context(), self.compiled.name, self.compiled.ptx
        if key not in _loaded:
            _loaded[key] = _driver().load(self.compiled)
        return _loaded[key]


def _packed(kernels: Sequence[_Tiled]) -> np.ndarray[Any, Any]:
    text = json.dumps([asdict(kernel) for kernel in kernels])
    return np.frombuffer(zlib.compress(text.encode(), 9), np.int8)


def _unpacked(data: Any) -> list[_Tiled]:
    kernels = json.loads(zlib.decompress(np.asarray(data, np.int8).tobytes()))
    return [
        _Tiled(tile if tile is None else SimpleNamespace(**tile), from_json(compiled))
        for tile, compiled in (kernel.values() for kernel in kernels)
    ]


def _compiled(
    kernel: Kernel, inputs: Sequence[Any], attributes: Mapping[str, Any], build: Build
) -> list[_Tiled]:
    """The kernel with each of the tile sizes that a launch can have, or with the first of these."""
    from dflash_plugins.compiler import compile_kernel

    names = {name: kind for kind, name in TYPES.items()}
    kernel.check(kernel.sizes([described.max for described in inputs]))
    s, a = kernel.sizes([_Fixed(described.desc.dims) for described in inputs]), kernel.given(attributes)
    dtype = names[inputs[kernel.inputs.index(kernel.like)].desc.type.name] if kernel.like else ""
    # Kernels for the oldest GPU run on all later ones.
    target = build.capability if build.capability in uses.TARGETS else uses.ROUND_TARGET
    choices: list[_Tiled] = []
    for tile in kernel.tiles(s):
        compiled = compile_kernel(kernel.use(s, a, dtype, tile), target)
        if compiled.fits and (build.timed or not choices):
            choices.append(_Tiled(tile, compiled))
    if not choices:
        raise BuildError(
            f"{kernel.name}: every tile shape writes nothing, spills registers or takes more than "
            f"{uses.SHARED_BYTES} bytes of shared memory; build with --plugins none"
        )
    return choices


class _KernelPlugin:
    """One kernel of a plan: what TensorRT calls, without the classes that a plugin must derive from.

    choices: the kernel with the tile sizes that TensorRT may choose from. tactic: its choice, from 1 on; 0 is the
        first.
    """

    def __init__(
        self,
        trt: Any,
        kernel: Kernel,
        attributes: dict[str, Any],
        build: Build | None,
        choices: Sequence[_Tiled] = (),
        tactic: int = 0,
    ) -> None:
        self.trt, self.kernel, self.attributes, self.build = trt, kernel, attributes, build
        self.choices, self.tactic = choices, tactic
        self.plugin_name, self.plugin_namespace, self.plugin_version = versioned(kernel.name), NAMESPACE, "1"
        self.timing_cache_id = json.dumps(attributes)
        ones = kernel.sizes([(1,) * 4] * len(kernel.inputs))
        self._kinds = [kind for _, kind in kernel.outputs(ones, kernel.given(attributes)).values()]
        self.num_outputs = len(self._kinds)

    def clone(self) -> Any:
        return type(self)(self.trt, self.kernel, self.attributes, self.build, self.choices, self.tactic)

    def attach_to_context(self, context: Any) -> Any:
        for choice in self.choices:
            choice.loaded()
        return self.clone()

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def get_output_data_types(self, types: Sequence[Any]) -> list[Any]:
        like = types[self.kernel.inputs.index(self.kernel.like)] if self.kernel.like else None
        return [getattr(self.trt.DataType, TYPES[kind]) if kind else like for kind in self._kinds]

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
        def size(expression: Any) -> Any:
            constant = expression.is_constant()
            return expression.get_constant_value() if constant else _Symbol(self.trt, builder, expression)

        shapes = [[size(lengths[i]) for i in range(len(lengths))] for lengths in inputs]
        results = []
        s, a = self.kernel.sizes(shapes), self.kernel.given(self.attributes)
        for sizes, _ in self.kernel.outputs(s, a).values():
            shape = self.trt.DimsExprs(len(sizes))
            for i, length in enumerate(sizes):
                shape[i] = length.size if isinstance(length, _Symbol) else builder.constant(length)
            results.append(shape)
        return results

    def supports_format_combination(self, position: int, described: Any, inputs: int) -> bool:
        return bool(described[position].desc.format == self.trt.TensorFormat.LINEAR)

    def configure_plugin(self, inputs: Any, outputs: Any) -> None:
        try:
            if self.build is not None:
                self.choices = _compiled(self.kernel, inputs, self.attributes, self.build)
        except Exception as error:
            _failures.append(error)

    def get_fields_to_serialize(self) -> Any:
        fields = [_field(self.trt, name, type(value), [value]) for name, value in self.attributes.items()]
        if self.choices:
            kernels = self.trt.PluginField(_KERNELS, _packed(self.choices), self.trt.PluginFieldType.INT8)
            fields.append(kernels)
        self._fields = fields  # TensorRT reads their arrays after this call, and does not keep them
        return self.trt.PluginFieldCollection(fields)

    def get_valid_tactics(self) -> list[int]:
        return [*range(1, len(self.choices) + 1)] if len(self.choices) > 1 else []

    def set_tactic(self, tactic: int) -> None:
        self.tactic = tactic

    def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
        return 0

    def on_shape_change(self, inputs: Any, outputs: Any) -> None:
        pass

    def enqueue(
        self, inputs: Any, outputs: Any, sources: Any, results: Any, workspace: int, stream: int
    ) -> None:
        choice = self.choices[max(self.tactic, 1) - 1]
        s = self.kernel.sizes([tuple(tensor.dims) for tensor in inputs])
        a = self.kernel.given(self.attributes)
        arguments = [
            *(ctypes.c_void_p(address) for address in sources),
            *(ctypes.c_int32(value) for value in self.kernel.integers(s, a).values()),
            *(ctypes.c_void_p(address) for address in results),
        ]
        grid = self.kernel.grid(s, a, choice.tile)
        _driver().launch(choice.loaded(), choice.compiled, grid, arguments, stream)


def _plugin_class(trt: Any) -> Callable[..., Any]:
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)

    class KernelPlugin(_KernelPlugin, *bases):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            for base in bases:
                base.__init__(self)
            _KernelPlugin.__init__(self, *arguments)

    return KernelPlugin


def _field(trt: Any, name: str, kind: type, values: Sequence[Any]) -> Any:
    dtype, field_type = {int: (np.int32, "INT32"), float: (np.float32, "FLOAT32")}[kind]
    return trt.PluginField(name, np.array(values, dtype), getattr(trt.PluginFieldType, field_type))


def _creator_class(trt: Any) -> Callable[..., Any]:
    make = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, kernel: Kernel) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = versioned(kernel.name), NAMESPACE, "1"
            self.field_names = trt.PluginFieldCollection(
                [_field(trt, name, kind, []) for name, kind in kernel.attributes.items()]
            )
            self.kernel, self.build = kernel, None

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            data = {field.name: field.data for field in fields}
            attributes = {
                attribute: kind(data[attribute][0]) for attribute, kind in self.kernel.attributes.items()
            }
            choices = _unpacked(data[_KERNELS]) if _KERNELS in data else []
            return make(trt, self.kernel, attributes, self.build, choices)

    return Creator


_MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's numbers of the processors
_NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 1, 4, 5, 6, 10, 11, 14
_HEADER, _SEGMENT, _SYMBOL = 64, 56, 24  # sizes of ELF's structures


def provide_library_name() -> None:
    """Let this process open TensorRT-RTX's library, which it has loaded, without the version in its name.

    The parser opens `libtensorrt_rtx.so` for a plugin, and NVIDIA's wheels have `libtensorrt_rtx.so.1` only. So the
    process ends ("terminate called without an active exception", seen with 1.7.1) unless a library of that name, which
    holds nothing and needs the real one, is loaded before. The loader finds what is loaded by its name.
    """
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL("libtensorrt_rtx.so")
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "shim.so"
            file.write_bytes(empty_library("libtensorrt_rtx.so", needs="libtensorrt_rtx.so.1"))
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)


def empty_library(name: str, *, needs: str) -> bytes:
    """A shared library for this processor (64 bits) with this name, no symbols and one dependency."""
    strings = b"\0" + name.encode() + b"\0" + needs.encode() + b"\0"
    strings += bytes(-len(strings) % 8)
    symbols = bytes(_SYMBOL)  # the first one is empty
    hashes = struct.pack("<4I", 1, 1, 0, 0)  # one bucket, with the empty symbol
    begin = _HEADER + 2 * _SEGMENT
    at = {_SYMTAB: begin, _HASH: begin + len(symbols), _STRTAB: begin + len(symbols) + len(hashes)}
    entries = [
        *((_NEEDED, 2 + len(name)), (_SONAME, 1), *at.items()),
        *((_STRSZ, len(strings)), (_SYMENT, _SYMBOL), (0, 0)),
    ]
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    place = at[_STRTAB] + len(strings)
    size = place + len(dynamic)
    machine = _MACHINES[platform.machine()]
    header = struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, _HEADER, 0, 0, _HEADER, _SEGMENT, 2, 64, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, size, size, 0x10000)
    links = struct.pack("<IIQQQQQQ", 2, 6, place, place, place, len(dynamic), len(dynamic), 8)
    return b"\x7fELF\2\1\1" + bytes(9) + header + load + links + symbols + hashes + strings + dynamic
