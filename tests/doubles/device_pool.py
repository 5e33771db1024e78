"""The arrays of a GPU over the fake engines: a pool whose rounds start before the host has read the ones before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.decoding.draft import chain_rows
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import NOBODY
from dflash_trt.decoding.sampling.sampler import sample
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.decoding.slots import Slots
from dflash_trt.engines.caches import FixedRows, SlotCaches, SlotRows, whole
from dflash_trt.engines.device.arrays import DeviceArrays
from dflash_trt.engines.device.runner import DeviceRunner
from dflash_trt.engines.device.sizes import DECODE, pass_sizes
from dflash_trt.engines.device.stream import HostStream
from tests.doubles.fake_engines import (
    BLOCK,
    MASK,
    POISON,
    ROW_BYTES,
    VOCAB,
    FakeEngine,
    FakeTarget,
)
from tests.doubles.pool import Pool, both

INPUTS = {
    "target": ["tokens", "start", "rows"],
    "drafter": ["features", "n_features", "start", "block"],
}
OUTPUTS = {
    "target": ["logits", "features", "accepted", "next_token"],
    "drafter": ["draft_tokens", "draft_logprobs"],
}
FLOATS = {"features", "logits", "draft_logprobs"}


class _NoRows(FixedRows):
    """A pool of rows that lie elsewhere."""

    row_bytes = 0

    def __init__(self, slots: int) -> None:
        self.arrays: dict[str, Any] = {}
        self.records = [SlotRows() for _ in range(slots)]

    def nothing(self, *inputs: Any) -> tuple[()]:
        return ()

    copy = take = write = drop = point = compact = clear = nothing  # type: ignore[assignment]


class _Caches:
    """Those of a fake engine, beside the records that an engine on a GPU has of its slots."""

    states = None

    def __init__(self, fake: FakeEngine) -> None:
        slots, capacity = fake.cache.shape
        self._fake, rows = fake, getattr(fake, "rows", None)
        self.records: Any = rows or SlotCaches([(whole(capacity), _NoRows(slots))], slots)
        self._both = rows is None
        self.room = lambda slot: capacity
        for name in ("advance", "bases", "holds", "last", "kinds"):
            setattr(self, name, getattr(self.records, name))

    def __getattr__(self, name: str) -> Any:
        if name not in ("copy", "move", "release", "keep", "clear") or not self._both:
            return getattr(self._fake, name)

        def both(*inputs: Any) -> Any:
            getattr(self.records, name)(*inputs)
            return getattr(self._fake, name)(*inputs)

        return both

    def restore(self, slot: int, kept: Sequence[Any], length: int) -> None:
        self._fake.restore(slot, kept, length)
        for kind in self.records.kinds if self._both else ():
            kind.records[slot].last = length


class OnDevice(DeviceRunner):
    """A fake engine that reads and writes tensors."""

    most_together = 4

    def __init__(self, role: str, fake: Any, chunk: int) -> None:
        slots = len(fake.cache) - fake.kept_slots
        self.fake, self.caches = fake, _Caches(fake)  # type: ignore[assignment]
        fake.moves_rows = False  # the arrays do
        self.active = lambda: slots  # how many slots have requests, but for those between them that have none
        self.nobody: Callable[[], list[int]] = list
        rows = slots * BLOCK + chunk
        self._most = {"logits": rows * VOCAB}, rows
        names = INPUTS[role] + OUTPUTS[role]
        dtypes = {name: torch.float32 if name in FLOATS else torch.int64 for name in names}
        device = torch.device("cpu")
        super().__init__(Path(role), dtypes, INPUTS[role], OUTPUTS[role], stream=HostStream(), device=device)

    def whole_buffer(self, profile: int, name: str) -> torch.Tensor:
        if (profile, name) not in self._buffers:
            size = self._most[0].get(name, self._most[1])
            self._buffers[profile, name] = torch.zeros(size, dtype=self.dtypes[name])
        return self._buffers[profile, name]

    def run(self, profile: int, feeds: Mapping[str, Any], *, first_slot: int = 0) -> dict[str, torch.Tensor]:
        arrays = {name: np.array(cache) for name, cache in feeds.items()}
        active = min(self.active(), len(arrays["start"])) if profile == DECODE else len(arrays["start"])
        for slot, start in enumerate(arrays["start"][:active], first_slot):
            for cache in self.caches.kinds:
                if cache.kind.window is not None:
                    assert cache.records[slot].base <= cache.kind.base(start)
                    assert arrays[cache.kind.input][slot - first_slot] == cache.records[slot].base
        whole = arrays.get("tokens", arrays["start"][:, None]).shape
        if "tokens" in arrays:
            if profile != DECODE:  # what follows a prompt is no fault of it
                arrays["tokens"] = arrays["tokens"][:, : arrays["rows"].max() + 1]
            arrays |= chain_rows(*arrays["tokens"].shape)
        idle = dict(enumerate(arrays["start"].tolist()[active:], first_slot + active))
        if profile == DECODE:
            idle |= {slot: int(arrays["start"][slot]) for slot in self.nobody()}
            if self.fake.memory is not None:
                arrays["start"][self.nobody()] = 0  # they may have none
        held = [self.fake.cache, self.fake.nan]
        held += [cache.pool.rows for cache in self.caches.kinds if hasattr(self.fake, "rows")]
        before = [{slot: rows[slot].copy() for slot in idle} for rows in held]
        outputs, results = (
            self.fake.run({n: x[:active] for n, x in arrays.items()}, first_slot=first_slot),
            {},
        )
        for rows, kept in zip(held, before, strict=True):
            for slot in idle:
                rows[slot] = kept[slot]
        for slot, start in idle.items():
            self.fake.cache[slot, start:] = POISON  # rows that belong to no token
            for cache in self.caches.kinds if hasattr(self.fake, "rows") else ():
                cache.pool.rows[slot, start - cache.records[slot].base :] = POISON
        for name in self.outputs:
            found = outputs[name]
            shape = len(arrays["start"]), *found.shape[1:]
            if name == "features":
                shape = *whole, 1
            results[name] = self.whole_buffer(profile, name)[: prod(shape)].view(shape)
            part = results[name][:active, : found.shape[1]] if found.ndim > 1 else results[name][:active]
            part.copy_(torch.from_numpy(np.ascontiguousarray(found)))
        return results

    def _first(self, shapes: Any, first_slot: int) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass


def by_host(use: Any, grid: Any, **arguments: Any) -> None:
    """The kernels between passes, by the host's sampler and by loops. Logits are adjusted for chains, by no words."""
    match use.function:
        case "read_texts":
            by_host.starts = arguments["start"].tolist()  # type: ignore[attr-defined]
            for slot, start in enumerate(by_host.starts):  # type: ignore[attr-defined]
                begin, known, _, _, *recent = arguments["facts"][slot].tolist()
                if begin >= 0:
                    recent = recent[max(len(recent) - known, 0) :]
                    tokens = [*recent, *arguments["tokens"][slot].tolist()]
                    at = np.r_[
                        known - len(recent) : known, start - begin : start - begin + arguments["nodes"]
                    ]
                    arguments["texts"][slot, at] = torch.tensor(tokens)
            by_host.texts = arguments["texts"]  # type: ignore[attr-defined]
        case "adjust_rows":
            for slot, start in enumerate(by_host.starts):  # type: ignore[attr-defined]
                if (begin := int(arguments["facts"][slot, 0])) < 0:
                    continue
                repetition, frequency, presence, _ = arguments["factors"][slot].numpy()
                for node, row in enumerate(arguments["logits"][slot].numpy()):
                    text = by_host.texts[slot, : start - begin + 1 + node].numpy()  # type: ignore[attr-defined]
                    count = np.bincount(text, minlength=VOCAB).astype(np.float32)
                    row += arguments["bias"][slot].numpy()
                    changed = np.where(row > 0, row / repetition, row * repetition)
                    changed = changed - frequency * count - presence * (count > 0)
                    row[:] = np.where((count > 0) | (arguments["counts"][slot].numpy() > 0), changed, row)
        case "sample_tiles":
            by_host.tiles = arguments  # type: ignore[attr-defined]
        case "sample_select":
            tiles: Any = by_host.tiles  # type: ignore[attr-defined]
            logits, positions = tiles["logits"].numpy(), tiles["position"].numpy()
            for i, row in enumerate(logits.reshape(-1, VOCAB)):
                request = i // logits.shape[1]
                params = SamplingParams(
                    temperature=float(tiles["temperature"][request]),
                    top_k=int(arguments["top_k"][request]),
                    top_p=float(tiles["top_p"][request]),
                    min_p=exp(-float(arguments["reach"][request])),
                )
                seed, position = int(tiles["seed"][request]), int(positions.reshape(-1)[i])
                known = np.isfinite(row.max())
                arguments["sampled"][i] = sample(row, params, seed, position, None) if known else -1
        case "accept_block":
            nodes = arguments["nodes_per_sequence"]
            tokens, sampled = (
                arguments["tokens"].view(-1, nodes),
                arguments["sampled"][: arguments["tokens"].numel()],
            )
            right = tokens[:, 1:] == sampled.view(-1, nodes)[:, :-1]
            accepted = torch.cumprod(right, 1).sum(1)
            arguments["accepted"].copy_(accepted)
            arguments["next_token"].copy_(sampled.view(-1, nodes).gather(1, accepted[:, None])[:, 0])
        case "fill_tokens":
            tokens, drafted = arguments["tokens"], arguments["drafted"]
            tokens.copy_(torch.cat((arguments["block"][:, :1], arguments["drafts"][:, :, 0]), dim=1))
            tokens[:, drafted:] = tokens[:, drafted - 1 : drafted].clone()
            arguments["rows"].copy_(torch.arange(tokens.shape[1]).expand(tokens.shape))
        case "end_round":
            arguments["finite"].copy_(torch.isfinite(arguments["logits"].amax(-1)))
            unread, places, features = arguments["unread"], arguments["places"], arguments["features"]
            for slot, place in enumerate(places.tolist()):
                for node in range(features.shape[1]):
                    if arguments["finite"][slot, node] and place + node < unread.shape[1]:
                        unread[slot, place + node] = features[slot, node]


class DevicePool(Pool):
    """Prefixes may take the memory of `kept` rows, or `further` slots."""

    def __init__(
        self,
        slots: int,
        *,
        chunk: int = 8,
        max_seq_len: int = 120,
        kept: int = 0,
        target: type[FakeTarget] = FakeTarget,
        further: int = 0,
    ) -> None:
        capacity = max_seq_len + 2 * BLOCK + 17
        self.target, self.drafter = both(target, slots, capacity, further)
        engines = [
            OnDevice(role, fake, max(chunk, 16))
            for role, fake in (("target", self.target), ("drafter", self.drafter))
        ]
        arrays = DeviceArrays(
            *engines,
            slots=slots,
            capacity=capacity,
            prefill_chunk=chunk,
            block_size=BLOCK,
            feature_size=1,
            vocab_size=VOCAB,
            run=by_host,
        )
        arrays.asynchronous = True
        for engine in engines:
            engine.active = lambda: len(arrays._active)
            engine.nobody = lambda: [i for i, request in enumerate(arrays._active) if request is NOBODY]
        self.pair = Pair(
            *engines,
            arrays,
            slots=slots,
            capacity=capacity,
            mask_token_id=MASK,
            vocab_size=VOCAB,
            prefill_chunk=chunk,
        )
        self.scheduler = Scheduler(self.pair)
        self.scheduler.slots = Slots(self.pair, kept * 2 * ROW_BYTES, page=8)
        self.followed = 0
        follow = self.pair.follow

        def counted(*inputs: Any) -> Any:
            self.followed += 1
            return follow(*inputs)

        self.pair.follow = counted  # type: ignore[method-assign]


assert BLOCK in pass_sizes(BLOCK)
