"""ONNX Runtime: the embedded engine, and the reference for every other engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.onnxruntime.caches import HostCaches, HostStates
from dflash_trt.errors import BundleError
from dflash_trt.hardware import cores, give_back_memory

Array = np.ndarray[Any, Any]

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
}
# Inputs by row that are not rows to write.
_NO_ROWS = ("depths", "visible")
# A decode round alternates between two shapes, and prompts add a few more. Beyond this number, all are dropped.
_MAX_BINDINGS = 64
# After so many passes that need less than half of the memory of inputs and outputs, it is given back, with what ONNX
# Runtime keeps for its own results. The next large pass takes it again, in milliseconds.
_SMALL_PASSES = 32


class _Bound(NamedTuple):
    """One set of shapes, bound once. A pass then only fills the inputs and runs. size: bytes of both."""

    binding: Any
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    size: int


class OnnxRuntimeRunner:
    """Runs one graph on the CPU over a pool of cache slots.

    A cache is an input `k_cache.i` [B, C, width] and an output `k_cache_out.i`. A pass over n sequences works on the
    slots `first_slot .. first_slot + n - 1`, as a view of the pool with as many rows C as the pass needs. Inputs and
    outputs of a cache are bound to the same memory. So are those of a state, an input `NAME_state.i` [B, ...].
    The engine itself gives a pass its inputs `base.W`, the positions of the first rows in layers with a window W.
    """

    def __init__(
        self,
        path: Path,
        *,
        slots: int,
        capacity: int,
        kinds: Sequence[CacheKind] = (),
        threads: int | None = None,
        deferred: bool = False,
    ) -> None:
        """`capacity`: positions of a slot. `kinds`: of the caches. Without them, every layer keeps all rows.

        `deferred`: the graph and its weights are loaded with the first pass. Until then all slots are empty.
        """
        self._path, self._threads = path, threads or cores() or 1
        self._session: Any = None
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, Any] = {}
        self.caches = HostCaches(kinds, slots, capacity)
        self._memory: dict[str, Array] = {}
        self._bound: dict[tuple[Any, ...], _Bound] = {}
        self._small = 0  # passes since one that needed at least half of `_memory`
        self._shrinking = ort.RunOptions()
        self._shrinking.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        if not deferred:
            self._load()

    def _load(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        # A block for each set of shapes, beside the memory of the passes before: a tenth more in all, and no faster.
        options.enable_mem_pattern = False
        # As the graph is loaded, the results of every node are compared with those of all nodes before: three quarters
        # of the time for INT8, a third to a half otherwise. Passes take the same time and memory without.
        options.enable_mem_reuse = False
        # Target and drafter take turns. Idle threads spin, because waking them takes as long as a small pass. They
        # spin only until the pass ends, because then the other engine needs the cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        path = self._path
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises its own, undocumented hierarchy
            raise BundleError(f"{path}: ONNX Runtime cannot load this graph: {error}") from error
        give_back_memory()  # a session that widens experts frees twice what it keeps
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = {o.name: o for o in self._session.get_outputs()}
        if old := [n for n, i in self._inputs.items() if "_cache." in n and len(i.shape) != 3]:
            raise BundleError(
                f"{path}: input {old[0]} has {len(self._inputs[old[0]].shape)} axes, expected 3: an earlier version "
                "built this bundle; build it again"
            )
        caches = {n: (i.shape[2], _DTYPES[i.type]) for n, i in self._inputs.items() if "_cache." in n}
        self.caches.allocate(caches)
        states = {
            n: (tuple(i.shape[1:]), _DTYPES[i.type])
            for n, i in self._inputs.items()
            if n.partition(".")[0].endswith("_state")
        }
        if states:
            self.caches.states = HostStates(self.caches.slots, states)
        self._base_inputs = [name for name in self._inputs if name.startswith("base.")]
        self._written = [
            n for n, i in self._inputs.items() if n not in _NO_ROWS and i.shape[1:2] in (["S"], ["K"])
        ]

    @property
    def most_pending(self) -> int:
        """The most rows of a pass that can be taken back; 0: any number."""
        return 0 if self.caches.states is None else self.caches.states.most_pending

    def run(self, feeds: Mapping[str, Array], *, first_slot: int = 0) -> dict[str, Array]:
        """Run one pass. The outputs are views that the next pass overwrites."""
        if self._session is None:
            self._load()
        starts = feeds["start"].tolist()
        # One row more than the pass writes, for a sink.
        written = sum([feeds[name].shape[1] for name in self._written if name in feeds]) + 1
        places, known = self.caches.prepare(first_slot, starts, written), self.caches.bases(starts)
        feeds = {
            **feeds,
            **{name: np.array(known.get(name, [0] * len(starts))) for name in self._base_inputs},
        }
        if shrinking := self._small >= _SMALL_PASSES:
            self._bound, self._memory, self._small = {}, {}, 0
        key = (places, first_slot, *[a.shape for a in feeds.values()])
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(feeds, places, first_slot)
            self._bound[key] = bound
        for name, array in feeds.items():
            bound.inputs[name][...] = array
        self._session.run_with_iobinding(bound.binding, self._shrinking if shrinking else None)
        self._small = 0 if 2 * bound.size >= self.held_bytes else self._small + 1
        return bound.outputs

    @property
    def held_bytes(self) -> int:
        """Bytes of the inputs and outputs of passes, without caches."""
        return sum(array.nbytes for array in self._memory.values())

    def _bind(
        self, feeds: Mapping[str, Array], places: tuple[tuple[int, int], ...], first_slot: int
    ) -> _Bound:
        if len(self._bound) >= _MAX_BINDINGS:
            self._bound.clear()
        if set(feeds) != (takes := set(self._inputs) - set(self.caches.arrays)):
            raise ValueError(f"the graph takes {sorted(takes)}, not {sorted(feeds)}")
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
            if "_cache_out." not in name and "_state_out" not in name
        }
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        batch = sizes.get("B", 1)
        views = dict(self.caches.views(places, batch))
        if self.caches.states is not None:
            views |= dict(self.caches.states.views(first_slot, batch))
        for name, view in views.items():
            binding.bind_input(name, "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
            kind, dot, layer = name.partition(".")
            out = f"{kind}_out{dot}{layer}"
            binding.bind_output(out, "cpu", 0, view.dtype.type, view.shape, view.ctypes.data)
        size = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
        return _Bound(binding, inputs, outputs, size)

    def _view(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """A view of the only buffer with this name. If the buffer grows, all bindings to the old one are dropped."""
        size = int(np.prod(shape))
        if name not in self._memory or self._memory[name].size < size:
            self._bound.clear()  # first, so that an interruption leaves no binding to the old memory
            self._memory[name] = np.zeros(max(size, 1), dtype)
        return self._memory[name][:size].reshape(shape)

    def close(self) -> None:
        """Free the session, the caches and every binding."""
        self._session = None
        self.caches.close()
        self._memory, self._bound = {}, {}
