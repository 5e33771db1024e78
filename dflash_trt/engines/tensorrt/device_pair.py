"""A target and its drafter on one GPU: drafts and features go from one to the other without seeing the host.

The same methods as `decoding.pair.EnginePair`. The host uploads positions, anchors and prompt tokens, and waits once in
a round, for what the target accepted; sampled requests read their rows of logits as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from dflash_plugins.version import check as check_plugins

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.draft import Draft
from dflash_trt.decoding.pair import USUAL_CONTEXT, Caches, Verified, chains
from dflash_trt.decoding.request import Request
from dflash_trt.engines.tensorrt.engine import TensorRTEngine
from dflash_trt.engines.tensorrt.flavour import FLAVOURS
from dflash_trt.engines.tensorrt.profiles import DECODE, PREFILL
from dflash_trt.errors import BuildError, BundleError

if TYPE_CHECKING:
    from dflash_plugins.launch import Acceptance, Sampling

Array = np.ndarray[Any, Any]
DEVICE = "cuda"


class DeviceArray:
    """A tensor on the GPU; its numbers come to the host when somebody looks at them. Leading columns stay there."""

    def __init__(self, tensor: torch.Tensor, host: Array | None = None) -> None:
        self.tensor, self._host = tensor, host

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def host(self) -> Array:
        if self._host is None:
            self._host = self.tensor.cpu().numpy()
        return self._host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.host(), dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and all(isinstance(part, slice) for part in key):
            return DeviceArray(self.tensor[key], None if self._host is None else self._host[key])
        return DeviceArray(self.tensor[key]).host() if self._host is None else self._host[key]


class DevicePair(Caches):
    """Runs passes; `draft_time` and `verify_time` are the GPU's seconds of the last `propose` and `verify`."""

    target: TensorRTEngine
    drafter: TensorRTEngine

    def __init__(
        self,
        target: TensorRTEngine,
        drafter: TensorRTEngine,
        *,
        slots: int,
        capacity: int,
        mask_token_id: int,
        feature_size: int,
        vocab_size: int,
        prefill_chunk: int,
        block_size: int,
        max_batch_size: int,
    ) -> None:
        self.target, self.drafter, self.slots, self.capacity = target, drafter, slots, capacity
        self.mask_token_id, self.prefill_chunk, self._vocab = mask_token_id, prefill_chunk, vocab_size
        self.draft_time = self.verify_time = 0.0
        device, self._stream = target.device, target.stream
        memory = max(target.memory_size, drafter.memory_size, 1)
        scratch = torch.empty(memory, dtype=torch.uint8, device=device)
        target.lend(scratch)
        drafter.lend(scratch)
        # Features of committed rows that the drafter has not seen, by slot: its input lies here. While prompts are
        # read, it is the target's own output.
        dtype = drafter.dtypes["features"]
        self._waiting = torch.zeros((max_batch_size, block_size, feature_size), dtype=dtype, device=device)
        drafter.bind(DECODE, "features", self._waiting)
        chunk = target.buffer(PREFILL, "features", 1, prefill_chunk, feature_size)
        drafter.bind(PREFILL, "features", chunk)
        self._chunk = chunk[0]
        self._rows = torch.arange(block_size, device=device)
        pinned = device.type == "cuda"
        # What the host waits for: accepted and next tokens, then which drafts and which rows of logits are finite.
        self._decided = torch.zeros((2, max_batch_size), dtype=torch.int64, pin_memory=pinned)
        self._finite = torch.zeros(max_batch_size * (1 + block_size), dtype=torch.bool, pin_memory=pinned)
        self._drafts_finite: torch.Tensor | None = (
            None  # of the last `propose`, on the GPU; None if none were made
        )
        self._tokens = torch.empty(max_batch_size * block_size, dtype=torch.int64, pin_memory=pinned)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        # Sampled requests are decided on the GPU where Triton is there to compile the kernels, else on the host.
        self.samples = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        self._sampling: tuple[Sequence[Request], Sampling | None] = ((), None)

    def prefill(
        self, tokens: Sequence[int], start: int, slot: int, *, draft: bool
    ) -> tuple[DeviceArray, bool]:
        """Write the rows of `tokens`, which stand at positions start, start+1, ...; at most `prefill_chunk` of them.

        With `draft`, the drafter takes them in as well. Returns the logits [V] of the last row, and whether the
        drafter's numbers are finite.
        """
        n = len(tokens)
        shapes = {"tokens": (1, n), "start": (1,), "rows": (1, 1)}
        with torch.cuda.stream(self._stream):
            for name, values in (("tokens", tokens), ("start", [start]), ("rows", [n - 1])):
                _upload(self.target.buffer(PREFILL, name, *shapes[name]), values)
            self.target.run(PREFILL, shapes, first_slot=slot)
            if draft:
                self._take_in(n, start, slot)
            sound = not draft or bool(
                torch.isfinite(self.drafter.buffer(PREFILL, "draft_logprobs", 1, 1)).all()
            )
            return DeviceArray(self.target.buffer(PREFILL, "logits", 1, 1, self._vocab)[0, 0]), sound

    def propose(self, active: Sequence[Request], length: int) -> Draft:
        """One drafter pass over slots 0 .. n-1: chains of `length` nodes.

        The drafter also takes in what was committed since its last pass. At length 1 it does not run.
        """
        n, width = len(active), self._waiting.shape[1]
        anchors = [request.anchor for request in active]
        with torch.cuda.stream(self._stream):
            self._events[0].record(self._stream)
            self._drafts_finite = None
            if length == 1:
                return Draft(np.array(anchors, np.int64)[:, None], None, np.zeros((n, 0), np.float32))
            fresh = [request.behind for request in active]
            shapes = {
                "features": self._waiting[:n].shape,
                "n_features": (n,),
                "start": (n,),
                "block": (n, length),
            }
            block = self.drafter.buffer(DECODE, "block", n, length)
            block.fill_(self.mask_token_id)
            _upload(block[:, 0], anchors)
            _upload(self.drafter.buffer(DECODE, "n_features", n), fresh)
            starts = [request.committed - behind for request, behind in zip(active, fresh, strict=True)]
            _upload(self.drafter.buffer(DECODE, "start", n), starts)
            self.drafter.run(DECODE, shapes)
            block[:, 1:].copy_(self.drafter.buffer(DECODE, "draft_tokens", n, length - 1))
            assert max(fresh) <= width
            for request in active:
                request.behind = 0
            logprobs = self.drafter.buffer(DECODE, "draft_logprobs", n, length - 1)
            self._drafts_finite = torch.isfinite(logprobs).all(dim=1)
            return Draft(DeviceArray(block), None, DeviceArray(logprobs))

    def verify(self, active: Sequence[Request], draft: Draft) -> Verified:
        """One target pass over the chains of slots 0 .. n-1; their tokens can be read without waiting then.

        The graph decides for the greedy requests. Where the kernels sample, they decide for all but penalized ones.
        """
        block = chains(draft)
        n, length = block.shape
        shapes = {"tokens": (n, length), "start": (n,), "rows": (n, length)}
        with torch.cuda.stream(self._stream):
            self._events[1].record(self._stream)
            tokens = self.target.buffer(DECODE, "tokens", n, length)
            tokens.copy_(
                block.tensor if isinstance(block, DeviceArray) else torch.from_numpy(block), non_blocking=True
            )
            self.target.buffer(DECODE, "rows", n, length).copy_(self._rows[:length].expand(n, length))
            _upload(self.target.buffer(DECODE, "start", n), [request.committed for request in active])
            self.target.run(DECODE, shapes)
            logits = self.target.buffer(DECODE, "logits", n, length, self._vocab)
            made = self._decide(active, tokens, logits)
            for i, name in enumerate(("accepted", "next_token")):
                found = self.target.buffer(DECODE, name, n) if made is None else getattr(made, name)
                self._decided[i, :n].copy_(found, non_blocking=True)
            finite, drafts_finite = self._finite[: n * length].view(n, length), self._finite[-n:]
            finite.copy_(torch.isfinite(logits.amax(dim=-1)), non_blocking=True)
            if self._drafts_finite is None:
                drafts_finite.fill_(True)
            else:
                drafts_finite.copy_(self._drafts_finite, non_blocking=True)
            host = self._tokens[: n * length].view(n, length)
            host.copy_(tokens, non_blocking=True)
            self._events[2].record(self._stream)
            self._stream.synchronize()
        if isinstance(block, DeviceArray):
            block._host = host.numpy().copy()
        self.draft_time, self.verify_time = (
            begin.elapsed_time(end) / 1e3 for begin, end in zip(self._events, self._events[1:], strict=False)
        )
        self._features = self.target.buffer(DECODE, "features", n, length, self._waiting.shape[2])
        accepted, next_token = self._decided[:, :n].numpy()
        return Verified(
            accepted,
            next_token,
            decided=[r.params.greedy if made is None else r.counts is None for r in active],
            finite=finite.numpy(),
            logits=DeviceArray(logits),
            drafts_finite=drafts_finite.numpy(),
        )

    def _decide(
        self, active: Sequence[Request], tokens: torch.Tensor, logits: torch.Tensor
    ) -> Acceptance | None:
        """Sampling and acceptance on the pass's stream; None where all are greedy, or have penalties."""
        if not self.samples or all(r.params.greedy or r.counts is not None for r in active):
            return None
        from dflash_plugins.launch import decide_round, sampling_tensors

        n, length = tokens.shape
        device = tokens.device
        requests, params = self._sampling
        if params is None or list(requests) != list(active):
            params = sampling_tensors([r.params for r in active], [r.seed for r in active], device)
            self._sampling = (list(active), params)
        lengths = [request.own_length(length) for request in active]
        return decide_round(
            params,
            torch.tensor(lengths).to(device, non_blocking=True),
            tokens,
            logits,
            self.target.buffer(DECODE, "start", n),
            mask_token=self.mask_token_id,
        )

    def commit(self, request: Request, slot: int, found: Verified, nodes: Sequence[int]) -> None:
        """These verified nodes of `slot` are right, each the child of the one before: their features wait for the
        drafter.
        """
        count = len(nodes)  # of a chain, which is all that `verify` takes, these are the first
        waiting, width = self._waiting[slot], self._waiting.shape[1]
        with torch.cuda.stream(self._stream):
            if request.behind + count > width:
                self._chunk[: request.behind].copy_(waiting[: request.behind])
                self._take_in(request.behind, request.committed - request.behind, slot)
                request.behind = 0
            waiting[request.behind : request.behind + count].copy_(self._features[slot, :count])
        request.behind += count

    def rehearse_draft(self, batch: int, length: int) -> None:
        """A drafter pass as `propose` runs it, over no request's tokens. Overwrites rows of slots 0 .. batch-1."""
        shapes = {
            "features": self._waiting[:batch].shape,
            "n_features": (batch,),
            "start": (batch,),
            "block": (batch, length),
        }
        self._rehearse(self.drafter, shapes, n_features=length, block=self.mask_token_id)

    def rehearse_verify(self, batch: int, length: int) -> None:
        """A target pass as `verify` runs it. Its tokens differ, so that they choose as many experts as others would."""
        shapes = {"tokens": (batch, length), "start": (batch,), "rows": (batch, length)}
        tokens = np.random.default_rng(length).integers(self._vocab, size=batch * length).tolist()
        _upload(self.target.buffer(DECODE, "tokens", batch, length), tokens)
        self._rehearse(self.target, shapes, rows=0)

    def _move_waiting(self, source: int, target: int) -> None:
        if max(source, target) < len(self._waiting):
            with torch.cuda.stream(self._stream):
                self._waiting[target].copy_(self._waiting[source])

    def _clear_waiting(self, slot: int) -> None:
        if slot < len(self._waiting):
            with torch.cuda.stream(self._stream):
                self._waiting[slot].zero_()

    def _rehearse(self, engine: TensorRTEngine, shapes: Mapping[str, Sequence[int]], **filled: int) -> None:
        with torch.cuda.stream(self._stream):
            start = min(USUAL_CONTEXT, self.capacity - 2 * len(self._rows))
            for name, value in {**filled, "start": start}.items():
                engine.buffer(DECODE, name, *shapes[name]).fill_(value)
            engine.run(DECODE, shapes)
            self._stream.synchronize()

    def _take_in(self, count: int, start: int, slot: int) -> None:
        """The first rows of the chunk into the drafter's cache; the two block rows behind them are of no use."""
        shapes = {
            "features": (1, count, self._chunk.shape[1]),
            "n_features": (1,),
            "start": (1,),
            "block": (1, 2),
        }
        for name, values in (
            ("n_features", [count]),
            ("start", [start]),
            ("block", 2 * [self.mask_token_id]),
        ):
            _upload(self.drafter.buffer(PREFILL, name, *shapes[name]).view(-1), values)
        self.drafter.run(PREFILL, shapes, first_slot=slot)


def _upload(tensor: torch.Tensor, values: Sequence[int]) -> None:
    """From pageable memory, which is read before this returns; nothing waits for the GPU."""
    tensor.copy_(torch.tensor(values, dtype=torch.int64).view(tensor.shape), non_blocking=True)


def open_pair(bundle: Bundle, *, slots: int, max_batch_size: int, prefill_chunk: int) -> DevicePair:
    """The bundle's plans for the GPU of this process, over `slots` cache slots.

    Raises BundleError: no such package, another version of it or of the plugins than built the plans, no GPU, or one
    without a plan.
    """
    manifest = bundle.manifest
    check_plugins(manifest, str(bundle.path))
    flavour, built = FLAVOURS[manifest["engine"]], manifest["tensorrt"]
    try:
        trt = flavour.load()
    except BuildError as error:
        raise BundleError(f"{bundle.path}: was built for {flavour.label}, and {error}") from None
    if trt.__version__ != built["version"]:
        raise BundleError(
            f"{bundle.path}: its plans were built by {flavour.label} {built['version']}, but {trt.__version__} is "
            "installed, and plans are good for the version that built them only: install that one, or build again"
        )
    if not torch.cuda.is_available():
        raise BundleError(
            f"{bundle.path}: {flavour.label} needs an NVIDIA GPU and a torch that sees it (torch {torch.__version__})"
        )
    major, minor = torch.cuda.get_device_capability()
    plans = built["plans"].get(f"{major}{minor}")
    if plans is None:
        raise BundleError(
            f"{bundle.path}: has plans for compute capability {', '.join(built['plans'])}, but this GPU has "
            f"{major}{minor}; build with --compute-capability {major}{minor}"
        )
    device, stream = torch.device(DEVICE), torch.cuda.Stream()
    target, drafter = (
        TensorRTEngine(trt, bundle.path / plans[role]["plan"], slots=slots, stream=stream, device=device)
        for role in ("target", "drafter")
    )
    return DevicePair(
        target,
        drafter,
        slots=slots,
        capacity=bundle.capacity,
        mask_token_id=manifest["mask_token_id"],
        feature_size=len(manifest["target_layer_ids"]) * manifest["hidden_size"],
        vocab_size=manifest["vocab_size"],
        prefill_chunk=min(prefill_chunk, built["prefill_chunk"]),
        block_size=manifest["block_size"],
        max_batch_size=max_batch_size,
    )
