"""ONNX Runtime: the embedded engine, and the reference that every other engine is held against."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from dflash_trt.engines.caches import RowCaches
from dflash_trt.errors import BundleError, DFlashError

Array = np.ndarray[Any, Any]

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
# A decode round alternates between two shapes; prompts bring a few more. Beyond this many, start over.
_MAX_BINDINGS = 64


class _Bound:
    """One set of shapes, bound once: filling the inputs and running is all that a pass costs."""

    def __init__(self, binding: Any, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        self.binding, self.inputs, self.outputs = binding, inputs, outputs


class OnnxRuntimeEngine:
    """Runs one graph on the CPU over a pool of cache slots.

    The pool is one array [slots, heads, capacity, head size] per cache. A pass over n sequences works on the
    slots `first_slot .. first_slot + n - 1`, as a view: cache inputs and outputs are bound to the same memory.
    """

    def __init__(self, path: Path, *, slots: int, capacity: int, threads: int | None = None) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.log_severity_level = 3
        # Target and drafter take turns. Threads wait for work spinning, since waking them takes as long as a small
        # pass, but only until the pass ends: then the other one needs the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session: Any = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises its own, undocumented hierarchy
            raise BundleError(f"{path}: ONNX Runtime cannot load this graph: {error}") from error
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = {o.name: o for o in self._session.get_outputs()}
        self._caches = {
            name: _pool((slots, i.shape[1], capacity, i.shape[3]), _DTYPES[i.type])
            for name, i in self._inputs.items()
            if "_cache." in name
        }
        self.caches = RowCaches(self._caches)
        self._memory: dict[str, Array] = {}
        self._bound: dict[tuple[Any, ...], _Bound] = {}

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]:
        """One pass. The outputs are views that the next pass overwrites."""
        key = (first_slot, *[a.shape for a in feeds.values()])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(feeds, first_slot)
            self._bound[key] = bound
        for name, array in feeds.items():
            bound.inputs[name][...] = array
        self._session.run_with_iobinding(bound.binding)
        return bound.outputs

    def _bind(self, feeds: Mapping[str, Array], first_slot: int) -> _Bound:
        if len(self._bound) >= _MAX_BINDINGS:
            self._bound.clear()
        if set(feeds) != set(self._inputs) - set(self._caches):
            raise ValueError(
                f"the graph takes {sorted(set(self._inputs) - set(self._caches))}, not {sorted(feeds)}"
            )
        sizes: dict[str, int] = {}
        for name, array in feeds.items():
            for axis, size in zip(self._inputs[name].shape, array.shape, strict=True):
                if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has {axis} = {size}, another input has {sizes[axis]}")
        sizes["K-1"] = sizes.get("K", 1) - 1
        inputs = {
            name: self._view(name, array.shape, _DTYPES[self._inputs[name].type])
            for name, array in feeds.items()
        }
        outputs = {
            name: self._view(name, tuple(sizes.get(d, d) for d in o.shape), _DTYPES[o.type])
            for name, o in self._outputs.items()
            if "_cache_out." not in name
        }
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, cache in self._caches.items():
            view = cache[first_slot : first_slot + sizes["B"]]
            if len(view) != sizes["B"]:
                raise ValueError(f"slots {first_slot}..{first_slot + sizes['B'] - 1} of {len(cache)}")
            binding.bind_input(name, "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
            out = name.replace("_cache.", "_cache_out.")
            binding.bind_output(out, "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
        return _Bound(binding, inputs, outputs)

    def _view(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A view into the one buffer this name has; growing it drops every binding to the old one."""
        size = int(np.prod(shape))
        if name not in self._memory or self._memory[name].size < size:
            self._bound.clear()  # first: whatever interrupts this, no binding to the old memory is left
            self._memory[name] = np.zeros(max(size, 1), dtype)
        return self._memory[name][:size].reshape(shape)

    def close(self) -> None:
        """Free the session, the caches and every binding."""
        self._session = None
        self._caches.clear()
        self._memory, self._bound = {}, {}


def _pool(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros, of which only what is written takes memory, in small pages.

    A slot's rows are scattered over a region per cache and head: huge pages, which NumPy asks for, would make most of
    the capacity resident for a few rows of each. Rows that nobody wrote are read and masked, so they must be finite.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # not on Unix
            return np.zeros(shape, dtype)
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError, ValueError) as error:
        raise DFlashError(
            f"no memory for a cache of {shape[0]} sequences, {shape[2]} tokens each ({size} bytes): lower "
            "max_batch_size, or build with a smaller --max-seq-len"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)
