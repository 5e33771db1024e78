"""Run a graph by torch on tensors and a stream of one GPU, or on a CPU.

On a GPU, passes are CUDA graphs, one for each set of shapes: the first pass of a set prepares its program, the second
is captured after it has run, and later ones are replayed. Nothing is then allocated, uploaded or waited for in a pass.
Where rows of slots begin is an input of a pass, so a graph is for any slots, unless there are states. Of prompts
only a few graphs are kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from dflash_trt.bundle.cache_kinds import CacheKind
from dflash_trt.engines.caches import by_kind, whole
from dflash_trt.engines.device.caches import UNIT, DeviceCaches, DeviceStates
from dflash_trt.engines.device.runner import DeviceRunner, Outputs, Shapes, updated
from dflash_trt.engines.device.sizes import DECODE, PREFILL
from dflash_trt.engines.device.stream import HostStream
from dflash_trt.engines.torch.layers import Rows
from dflash_trt.engines.torch.program import Graph, Program
from dflash_trt.logs import warn_once

Tensor = torch.Tensor
_log = logging.getLogger(__name__)
# Passes are padded to few sizes (device/sizes.py): 8 slots and blocks of 16 have 20 of a target and 16 of a drafter.
# Of those without graphs, as of a prompt's last parts at the end of a cache, the ones used longest ago are dropped
# beyond so many.
MOST_PROGRAMS = 64
# Prompts that are captured: seven lengths (device/sizes.py), with states for each of the first slots. Others, and those
# of several in a pass, are launched call by call.
MOST_PROMPTS = 28
# Logits of one row each: 10 MB at a vocabulary of 151,936.
MOST_TOGETHER = 16
# Ended requests whose rows are kept, where memory is shared. They take no memory but these.
KEPT = 1024


class TorchRunner(DeviceRunner):
    """One graph over caches [heads, rows, size] that have the rows of all slots; of a graph that reads them by other
    operators than its own, [slots, heads, capacity, size]. `DeviceRunner` documents it.

    Caches are written in place. A state's output has memory of its own (device/caches.py).
    """

    def __init__(
        self,
        graph: Graph,
        *,
        slots: int,
        prefill_chunk: int,
        block_size: int,
        stream: Any,
        kinds: Sequence[CacheKind] = (),
        tokens: int | None = None,
    ) -> None:
        """graph: with its weights. `kinds`: of caches. `tokens`: of all slots; None: each has the most."""
        # The profiles whose passes are captured.
        self._graphs = set[int]() if isinstance(stream, HostStream) else {PREFILL, DECODE}
        self._graph, device = graph, graph.device
        self._regions = not graph.opens([name for name in graph.inputs if "_cache." in name])
        caches: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, signature in graph.inputs.items():
            shape = tuple(int(n) for n in signature.shape[1:] if isinstance(n, int))
            if "_cache." in name:
                caches[name] = shape, signature.dtype
            elif name.partition(".")[0].endswith("_state"):
                states[name] = shape, signature.dtype
        held = {*caches, *states}
        kinds, spare = kinds or (whole(0),), -(-(2 * block_size + 1) // UNIT) * UNIT
        kept = slots + KEPT if self._regions and tokens is not None else 0
        self._caches, most = dict[str, Tensor](), list[int]()
        for kind, names in zip(kinds, by_kind(kinds, caches), strict=True):
            rows = max([caches[name][0][1] for name in names], default=0)
            most.append(rows)
            total = slots * rows
            if kind.window is None and kept:
                total = spare + max(tokens or 0, rows)
            for name in names:
                (heads, rows, size), dtype = caches[name]
                shape = (heads, total, size) if self._regions else (slots, heads, rows, size)
                self._caches[name] = torch.zeros(shape, dtype=dtype, device=device)
        dtypes = {name: s.dtype for name, s in (graph.inputs | graph.outputs).items()}
        of_pass = (
            (n for n in graph.inputs if n not in held),
            (n for n in graph.outputs if n not in set(map(updated, held))),
        )
        super().__init__(graph.path, dtypes, *of_pass, stream=stream, device=device)
        of_slots = DeviceStates(states, slots, stream, device) if states else None
        regions: dict[str, Any] = {"most": most, "spare": spare, "kept": kept} if self._regions else {}
        self.caches = DeviceCaches(self._caches, stream, slots, kinds, of_slots, **regions)
        self.most_together = 1 if states else MOST_TOGETHER
        one = {"B": self.most_together, "S": prefill_chunk, "R": 1, "K": 2, "K-1": 1}
        several = {"B": slots, "S": block_size, "R": block_size, "K": block_size, "K-1": block_size - 1}
        self._most = {PREFILL: one, DECODE: several}
        self._programs: OrderedDict[Shapes, Program] = OrderedDict()
        self._pool: Any = None  # the graphs' memory: they take turns

    def whole_buffer(self, profile: int, name: str) -> Tensor:
        if (profile, name) not in self._buffers:
            described = self._graph.inputs.get(name) or self._graph.outputs[name]
            most = self._most[profile]
            size = prod(n if isinstance(n, int) else most[n] for n in described.shape)
            if profile == PREFILL and "S" in described.shape:  # shared by the prompts of a pass
                size //= most["B"]
            whole = torch.zeros(size, dtype=described.dtype, device=self.device)
            self._buffers[profile, name] = whole
        return self._buffers[profile, name]

    def _held(self, profile: int, first_slot: int, batch: int) -> dict[str, tuple[Any, Any]]:
        """What a pass from this slot on reads of each cache and state, and where it writes."""
        held, part = dict[str, tuple[Any, Any]](), slice(first_slot, first_slot + batch)
        for pool in [kind.pool for kind in self.caches.kinds]:
            for name, cache in pool.arrays.items():
                if self._regions:
                    held[name] = (Rows(cache[None], pool.most, *pool.regions[profile][:, :batch]),) * 2
                else:
                    held[name] = cache[part], cache[part]
        if self.caches.states is not None:
            for name, (now, new) in self.caches.states.bound(first_slot).items():
                held[name] = now[:batch], new[:batch]
        return held

    def _first(self, shapes: Shapes, first_slot: int) -> Outputs:
        profile, *sizes = shapes
        feeds = {
            name: self.buffer(profile, name, *size) for name, size in zip(self.inputs, sizes, strict=True)
        }
        held = self._held(profile, first_slot, len(feeds["start"]))
        feeds |= {name: now for name, (now, _) in held.items()}
        program = self._programs.get(shapes)
        if program is None:
            # Not those with graphs: one that ends takes cuBLAS's memory of the stream from all others (torch's issue
            # 193402).
            captured = {of_graph for of_graph, _ in self._captured}
            others = [key for key in self._programs if key not in captured]
            for key in others[: max(len(others) - MOST_PROGRAMS + 1, 0)]:
                del self._programs[key]
            # A prompt's pass of a drafter only fills its caches.
            filling = profile == PREFILL and "draft_tokens" in self.outputs
            wanted = [updated(name) for name in held] if filling else None
            self._programs[shapes], results = self._graph.first_pass(feeds, wanted, prompt=profile == PREFILL)
            return self._placed(profile, results, held)
        self._programs.move_to_end(shapes)
        # A pass before the capture, in the same thread: cuBLAS makes a handle and memory for each thread, which it must
        # not do in a capture, and the programs of prompts come from the thread that opened the engine.
        outputs = self._placed(profile, program(feeds), held)
        alone = len(feeds["start"]) == 1 and self._prompts() < MOST_PROMPTS
        if profile in self._graphs and (profile == DECODE or alone):
            self._capture((shapes, self._place(first_slot)), program, feeds, held)
        return outputs

    def _place(self, first_slot: int) -> int:
        """A pass reads where regions begin, but states lie by slot."""
        return 0 if self._regions and self.caches.states is None else first_slot

    def _prompts(self) -> int:
        return sum(profile == PREFILL for (profile, *_), _ in self._captured)

    def _placed(
        self, profile: int, results: Mapping[str, Any], held: Mapping[str, tuple[Any, Any]]
    ) -> dict[str, Tensor]:
        """Copy a pass's outputs to their buffers, and new states to their place."""
        for name, (_, new) in held.items():
            state = results[updated(name)]
            if not isinstance(state, Rows) and state.data_ptr() != new.data_ptr():
                new.copy_(state)
        outputs = {}
        for name in [name for name in self.outputs if name in results]:
            outputs[name] = self.buffer(profile, name, *results[name].shape)
            outputs[name].copy_(results[name])
        return outputs

    def _capture(
        self,
        place: Any,
        program: Program,
        feeds: Mapping[str, Tensor],
        held: Mapping[str, tuple[Any, Any]],
    ) -> None:
        """Capture this pass, without running it. If that fails, those of its profile are not captured from now on: a
        prompt may find no memory where a round does.
        """
        profile, graph = place[0][0], torch.cuda.CUDAGraph()
        if not self._captured:  # torch takes no more graphs into a pool whose last one has ended
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Work of other threads may go on. `torch.cuda.graph` would wait for the device and empty its cache.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._placed(profile, program(feeds), held)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self._graphs.discard(profile)
            passes = "prompts run" if profile == PREFILL else "rounds run"
            warn_once(_log, f"{self.path}: {passes} without CUDA graphs, because a capture failed: {error}")
            return
        self._captured[place] = graph.replay, outputs

    def close(self) -> None:
        """Free graphs, buffers, caches and weights."""
        self.stream.synchronize()
        for kept in (self._captured, self._programs, self._buffers, self._caches):
            kept.clear()
        self._graph.close()
        self.caches = DeviceCaches({}, self.stream, 0)
