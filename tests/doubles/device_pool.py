"""The arrays of a GPU over the fake engines: a pool whose rounds start before the host has read the ones before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_trt.decoding.draft import chain_rows
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
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

    def nothing(self, *given: Any) -> tuple[()]:
        return ()

    copy = take = write = drop = point = compact = clear = nothing  # type: ignore[assignment]


class _Caches:
    """Those of a fake engine, beside the records that an engine on a GPU has of its slots."""

    states = None

    def __init__(self, fake: FakeEngine) -> None:
        slots, capacity = fake.cache.shape
        self._fake, own = fake, getattr(fake, "rows", None)
        self.records: Any = own or SlotCaches([(whole(capacity), _NoRows(slots))], slots)
        self._both = own is None
        self.room = lambda slot: capacity
        for name in ("advance", "bases", "holds", "last", "kinds"):
            setattr(self, name, getattr(self.records, name))

    def __getattr__(self, name: str) -> Any:
        if name not in ("copy", "move", "release", "keep", "clear") or not self._both:
            return getattr(self._fake, name)

        def both(*given: Any) -> Any:
            getattr(self.records, name)(*given)
            return getattr(self._fake, name)(*given)

        return both

    def restore(self, slot: int, kept: Sequence[Any], length: int) -> None:
        self._fake.restore(slot, kept, length)
        for each in self.records.kinds if self._both else ():
            each.records[slot].last = length


class OnDevice(DeviceRunner):
    """A fake engine that reads and writes tensors."""

    most_together = 4

    def __init__(self, role: str, fake: Any, chunk: int) -> None:
        slots = len(fake.cache) - fake.kept_slots
        self.fake, self.caches = fake, _Caches(fake)  # type: ignore[assignment]
        fake.moves_rows = False  # the arrays do
        self.active = lambda: slots  # how many slots have requests
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
        given = {name: np.array(each) for name, each in feeds.items()}
        active = min(self.active(), len(given["start"])) if profile == DECODE else len(given["start"])
        for slot, start in enumerate(given["start"][:active], first_slot):
            for each in self.caches.kinds:
                if each.kind.window is not None:
                    assert each.records[slot].base <= each.kind.base(start)
                    assert given[each.kind.input][slot - first_slot] == each.records[slot].base
        whole = given.get("tokens", given["start"][:, None]).shape
        if "tokens" in given:
            if profile != DECODE:  # what follows a prompt is no fault of it
                given["tokens"] = given["tokens"][:, : given["rows"].max() + 1]
            given |= chain_rows(*given["tokens"].shape)
        outputs, made = self.fake.run({n: x[:active] for n, x in given.items()}, first_slot=first_slot), {}
        for slot, start in enumerate(given["start"].tolist()[active:], first_slot + active):
            self.fake.cache[slot, start:] = POISON  # rows that belong to no token
            for each in self.caches.kinds if hasattr(self.fake, "rows") else ():
                each.pool.rows[slot, start - each.records[slot].base :] = POISON
        for name in self.outputs:
            found = outputs[name]
            shape = len(given["start"]), *found.shape[1:]
            if name == "features":
                shape = *whole, 1
            made[name] = self.whole_buffer(profile, name)[: prod(shape)].view(shape)
            part = made[name][:active, : found.shape[1]] if found.ndim > 1 else made[name][:active]
            part.copy_(torch.from_numpy(np.ascontiguousarray(found)))
        return made

    def _first(self, shapes: Any, first_slot: int) -> Any:
        raise AssertionError

    def close(self) -> None:
        pass


def by_host(use: Any, grid: Any, **given: Any) -> None:
    """The kernels between passes, by the host's sampler and by loops. Logits are adjusted for chains, by no words."""
    match use.function:
        case "read_texts":
            by_host.starts = given["start"].tolist()  # type: ignore[attr-defined]
            for slot, start in enumerate(by_host.starts):  # type: ignore[attr-defined]
                begin, known, _, _, *recent = given["facts"][slot].tolist()
                if begin >= 0:
                    recent = recent[max(len(recent) - known, 0) :]
                    tokens = [*recent, *given["tokens"][slot].tolist()]
                    at = np.r_[known - len(recent) : known, start - begin : start - begin + given["nodes"]]
                    given["texts"][slot, at] = torch.tensor(tokens)
            by_host.texts = given["texts"]  # type: ignore[attr-defined]
        case "adjust_rows":
            for slot, start in enumerate(by_host.starts):  # type: ignore[attr-defined]
                if (begin := int(given["facts"][slot, 0])) < 0:
                    continue
                repetition, frequency, presence, _ = given["factors"][slot].numpy()
                for node, row in enumerate(given["logits"][slot].numpy()):
                    text = by_host.texts[slot, : start - begin + 1 + node].numpy()  # type: ignore[attr-defined]
                    count = np.bincount(text, minlength=VOCAB).astype(np.float32)
                    row += given["bias"][slot].numpy()
                    changed = np.where(row > 0, row / repetition, row * repetition)
                    changed = changed - frequency * count - presence * (count > 0)
                    row[:] = np.where((count > 0) | (given["counts"][slot].numpy() > 0), changed, row)
        case "sample_tiles":
            by_host.tiles = given  # type: ignore[attr-defined]
        case "sample_select":
            tiles: Any = by_host.tiles  # type: ignore[attr-defined]
            logits, positions = tiles["logits"].numpy(), tiles["position"].numpy()
            for i, row in enumerate(logits.reshape(-1, VOCAB)):
                request = i // logits.shape[1]
                params = SamplingParams(
                    temperature=float(tiles["temperature"][request]),
                    top_k=int(given["top_k"][request]),
                    top_p=float(tiles["top_p"][request]),
                    min_p=exp(-float(given["reach"][request])),
                )
                seed, position = int(tiles["seed"][request]), int(positions.reshape(-1)[i])
                known = np.isfinite(row.max())
                given["sampled"][i] = sample(row, params, seed, position, None) if known else -1
        case "accept_block":
            nodes = given["nodes_per_sequence"]
            tokens, sampled = given["tokens"].view(-1, nodes), given["sampled"][: given["tokens"].numel()]
            right = tokens[:, 1:] == sampled.view(-1, nodes)[:, :-1]
            accepted = torch.cumprod(right, 1).sum(1)
            given["accepted"].copy_(accepted)
            given["next_token"].copy_(sampled.view(-1, nodes).gather(1, accepted[:, None])[:, 0])
        case "fill_tokens":
            tokens, drafted = given["tokens"], given["drafted"]
            tokens.copy_(torch.cat((given["block"][:, :1], given["drafts"][:, :, 0]), dim=1))
            tokens[:, drafted:] = tokens[:, drafted - 1 : drafted].clone()
            given["rows"].copy_(torch.arange(tokens.shape[1]).expand(tokens.shape))
        case "end_round":
            given["finite"].copy_(torch.isfinite(given["logits"].amax(-1)))
            unread, places, features = given["unread"], given["places"], given["features"]
            for slot, place in enumerate(places.tolist()):
                for node in range(features.shape[1]):
                    if given["finite"][slot, node] and place + node < unread.shape[1]:
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

        def counted(*given: Any) -> Any:
            self.followed += 1
            return follow(*given)

        self.pair.follow = counted  # type: ignore[method-assign]


assert BLOCK in pass_sizes(BLOCK)
