"""Plugins of TensorRT-RTX, which has no quickly deployable ones: classes in Python that launch our compiled kernels.

A plan holds the PTX of its kernels, so a process that loads it needs no Triton. But it must register these classes
first, as TensorRT-RTX calls them for every launch that no CUDA graph replays. The kernels, their outputs and their
grids are those of plugin_table.py.

Written against `IPluginV3` of TensorRT-RTX 1.7; `trt` is the module `tensorrt_rtx`.
"""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_plugins import kernel_specs as uses
from dflash_plugins.compiled import Compiled, CudaDriver, from_json
from dflash_plugins.plugin_table import NAMESPACE, PLUGINS, Plugin, Sizes, Symbols, versioned
from dflash_trt.errors import BuildError

# TensorRT-RTX computes attention, taps and acceptance well by itself. It widens all experts for every row, and has no
# operator for a recurrence.
NAMES = ("MoERoute", "MoEGroup", "MoEGateUp", "MoEDown", "MoECombine", "GatedDeltaNet")
_KERNEL = "kernel"  # the field of a plan that holds a compiled kernel
_loaded: dict[tuple[Any, ...], ctypes.c_void_p] = {}  # kernels by context, name and text
_creators: list[Any] = []  # TensorRT-RTX refers to them for as long as the process lives
# Of kernels that a plan needs: an exception in `configure_plugin` ends the process.
_failures: list[Exception] = []


def register(trt: Any, capability: int | None = None) -> None:
    """Register the plugins, to be compiled for this compute capability, or to be loaded from a plan with None."""
    if not _creators:
        provide_library_name()
        creator = _creator_class(trt)
        _creators.extend(creator(plugin) for plugin in PLUGINS if plugin.name in NAMES)
        for each in _creators:
            if not trt.get_plugin_registry().register_creator(each, NAMESPACE):
                _creators.clear()
                raise BuildError(f"TensorRT-RTX {trt.__version__} refuses the plugin {each.name}")
    for each in _creators:
        each.capability = capability
    _failures.clear()


def check() -> None:
    """Raise what went wrong while kernels were compiled for the last plan."""
    if _failures:
        raise _failures[0]


@cache
def _driver() -> CudaDriver:
    return CudaDriver()


class _Dimension:
    """A symbolic size of TensorRT's, with the operations that the shapes and grids of plugin_table.py use."""

    def __init__(self, trt: Any, builder: Any, size: Any) -> None:
        self._trt, self._builder = trt, builder
        self.size = builder.constant(size) if isinstance(size, int) else size

    def _with(self, operation: str, other: Any) -> _Dimension:
        other = other if isinstance(other, _Dimension) else _Dimension(self._trt, self._builder, int(other))
        kind = getattr(self._trt.DimensionOperation, operation)
        made = self._builder.operation(kind, self.size, other.size)
        return _Dimension(self._trt, self._builder, made)

    def __add__(self, other: Any) -> _Dimension:
        return self._with("SUM", other)

    def __mul__(self, other: Any) -> _Dimension:
        return self._with("PROD", other)

    def __floordiv__(self, other: Any) -> _Dimension:
        return self._with("FLOOR_DIV", other)

    def ceil_div(self, other: Any) -> _Dimension:
        return self._with("CEIL_DIV", other)

    def minimum(self, other: Any) -> _Dimension:
        return self._with("MIN", other)


@dataclass(frozen=True)
class _Kernel:
    """A compiled kernel, as a plan holds it, and its tile sizes."""

    tile: uses.Tile | None
    compiled: Compiled

    def field(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(zlib.compress(json.dumps(asdict(self)).encode(), 9), np.int8)

    @classmethod
    def read(cls, data: Any) -> _Kernel:
        fields = json.loads(zlib.decompress(np.asarray(data, np.int8).tobytes()))
        tile = None if fields["tile"] is None else uses.Tile(**fields["tile"])
        return cls(tile, from_json(fields["compiled"]))

    def launch(self, grid: Sequence[int], values: Sequence[Any], stream: int) -> None:
        _driver().launch(self.loaded(), self.compiled, grid, values, stream)

    def loaded(self) -> ctypes.c_void_p:
        """The kernel in the current context, which a CUDA graph that is captured cannot load."""
        key = _driver().context(), self.compiled.name, self.compiled.ptx
        if key not in _loaded:
            _loaded[key] = _driver().load(self.compiled)
        return _loaded[key]


def _compiled(plugin: Plugin, inputs: Sequence[Any], attributes: dict[str, Any], capability: int) -> _Kernel:
    """The kernel with the first tile sizes that a launch can have: TensorRT-RTX times no tactics without a GPU."""
    from dflash_plugins.compiler import compile_kernel

    sizes = Sizes(versioned(plugin.name), inputs)
    # Kernels for the oldest GPU run on all later ones.
    target = capability if capability in uses.TARGETS else uses.ROUND_TARGET
    for tile in (None,) if plugin.tiles is None else plugin.tiles(sizes):
        made = compile_kernel(plugin.use(sizes, attributes, tile), target)
        assert not isinstance(tile, uses.AttentionTile)
        if made.fits:
            return _Kernel(tile, made)
    raise BuildError(
        f"{plugin.name}: every tile shape spills registers or takes more than {uses.SHARED_BYTES} bytes of shared "
        "memory; build with --plugins none"
    )


class _KernelPlugin:
    """One kernel of a plan: what TensorRT-RTX calls, without the classes that a plugin must derive from."""

    def __init__(
        self,
        trt: Any,
        plugin: Plugin,
        attributes: dict[str, Any],
        capability: int | None,
        kernel: _Kernel | None,
    ) -> None:
        self.trt, self.plugin, self.attributes = trt, plugin, attributes
        self.capability, self.kernel = capability, kernel
        self.plugin_name, self.plugin_namespace, self.plugin_version = versioned(plugin.name), NAMESPACE, "1"
        self.num_outputs = len(self.get_output_data_types([None] * len(plugin.inputs)))

    def clone(self) -> Any:
        return type(self)(self.trt, self.plugin, self.attributes, self.capability, self.kernel)

    def attach_to_context(self, context: Any) -> Any:
        if self.kernel is not None:
            self.kernel.loaded()
        return self.clone()

    def get_capability_interface(self, kind: Any) -> Any:
        return self

    def get_output_data_types(self, types: Sequence[Any]) -> list[Any]:
        kinds = self.plugin.kinds(self.attributes)
        return [types[kind] if isinstance(kind, int) else getattr(self.trt.DataType, kind) for kind in kinds]

    def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
        dimension = partial(_Dimension, self.trt, builder)
        shapes = [[dimension(each[i]) for i in range(len(each))] for each in inputs]
        made = []
        symbols = Symbols(shapes, _Dimension.ceil_div, _Dimension.minimum)
        for sizes, _ in self.plugin.outputs(symbols, self.attributes):
            shape = self.trt.DimsExprs(len(sizes))
            for i, size in enumerate(sizes):
                shape[i] = (size if isinstance(size, _Dimension) else dimension(size)).size
            made.append(shape)
        return made

    def supports_format_combination(self, position: int, described: Any, inputs: int) -> bool:
        return bool(described[position].desc.format == self.trt.TensorFormat.LINEAR)

    def configure_plugin(self, inputs: Any, outputs: Any) -> None:
        given = [SimpleNamespace(shape=each.desc.dims, dtype=each.desc.type) for each in inputs]
        try:
            if self.capability is not None:
                self.kernel = _compiled(self.plugin, given, self.attributes, self.capability)
        except Exception as error:
            _failures.append(error)

    def get_fields_to_serialize(self) -> Any:
        fields = [_field(self.trt, name, type(value), [value]) for name, value in self.attributes.items()]
        if self.kernel is not None:
            fields.append(self.trt.PluginField(_KERNEL, self.kernel.field(), self.trt.PluginFieldType.INT8))
        return self.trt.PluginFieldCollection(fields)

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        pass

    def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
        return 0

    def on_shape_change(self, inputs: Any, outputs: Any) -> None:
        pass

    def enqueue(
        self, inputs: Any, outputs: Any, sources: Any, results: Any, workspace: int, stream: int
    ) -> None:
        assert self.kernel is not None
        symbols = Symbols([tuple(each.dims) for each in inputs], lambda a, b: -(-a // b), min)
        grid = self.plugin.grid(symbols, self.attributes, self.kernel.tile)
        arguments = [
            *(ctypes.c_void_p(address) for address in sources),
            *(ctypes.c_int32(value) for value in self.plugin.integers(symbols, self.attributes)),
            *(ctypes.c_void_p(address) for address in results),
        ]
        self.kernel.launch(grid, arguments, stream)


def _plugin_class(trt: Any) -> Callable[..., Any]:
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)

    class KernelPlugin(_KernelPlugin, *bases):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            for base in bases:
                base.__init__(self)
            _KernelPlugin.__init__(self, *given)

    return KernelPlugin


def _field(trt: Any, name: str, kind: type, values: Sequence[Any]) -> Any:
    dtype, field_type = {int: (np.int32, "INT32"), float: (np.float32, "FLOAT32")}[kind]
    return trt.PluginField(name, np.array(values, dtype), getattr(trt.PluginFieldType, field_type))


def _creator_class(trt: Any) -> Callable[..., Any]:
    make = _plugin_class(trt)

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, plugin: Plugin) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_namespace, self.plugin_version = versioned(plugin.name), NAMESPACE, "1"
            self.field_names = trt.PluginFieldCollection(
                [_field(trt, name, kind, []) for name, kind in plugin.attributes.items()]
            )
            self.plugin, self.capability = plugin, None

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            given = {field.name: field.data for field in fields}
            attributes = {each: kind(given[each][0]) for each, kind in self.plugin.attributes.items()}
            kernel = _Kernel.read(given[_KERNEL]) if _KERNEL in given else None
            return make(trt, self.plugin, attributes, self.capability, kernel)

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
