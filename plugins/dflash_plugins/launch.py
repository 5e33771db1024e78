"""Launch the kernels on torch tensors, for the runtime, tests and benchmarks.

`run` says how: `driver.Kernels` launches what was compiled before, and needs no Triton. `by_triton` compiles, or
interprets on CPU tensors; set TRITON_INTERPRET=1 before anything imports triton. Launches go to torch's current stream.
They allocate their outputs unless these are given.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_plugins import kernel_specs as uses
from dflash_trt.decoding.params import SamplingParams

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}

# Called with a kernel's use, its grid, and its arguments by name, without those that are constants.
Run = Callable[..., None]


def by_triton(use: uses.Use, grid: tuple[int, ...], **arguments: Any) -> None:
    """A launch for which Triton compiles the kernel, or interprets it."""
    module = importlib.import_module(f"dflash_plugins.kernels.{use.module}")
    getattr(module, use.function)[grid](**arguments, **use.launch)


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of B requests, one tensor entry each: see `sampling_tensors`."""

    temperature: torch.Tensor  # [B] float32
    reach: torch.Tensor  # [B] float32, -log(min_p)
    top_k: torch.Tensor  # [B] int32
    top_p: torch.Tensor  # [B] float32
    seed: torch.Tensor  # [B] int64, the bits of an unsigned number


def sampling_tensors(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str
) -> Sampling:
    """The parameters of requests as tensors. Penalties are not included: apply them to the logits first."""

    def tensor(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return Sampling(
        temperature=tensor([p.temperature for p in params], torch.float32),
        reach=tensor([-math.log(p.min_p) if p.min_p > 0 else math.inf for p in params], torch.float32),
        top_k=tensor([p.top_k for p in params], torch.int32),
        top_p=tensor([p.top_p for p in params], torch.float32),
        seed=tensor([seed - (seed >> 63 << 64) for seed in seeds], torch.int64),
    )


def sample_rows(
    logits: torch.Tensor, params: Sampling, positions: torch.Tensor, *, run: Run = by_triton
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [B, R] and their log-probabilities float32 [B, R] from float32 logits [B, R, V].

    positions: int64 [B, R], the position of the token that each row predicts. A row with a NaN or infinite logit, or
    without a finite one, gets the token -1 and a NaN.
    """
    batch, rows, vocab = logits.shape
    tiles = uses.vocabulary_tiles(vocab)
    groups = tiles * uses.TILE_GROUPS

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    given = {name: getattr(params, name) for name in ("temperature", "top_p", "seed")}
    given |= {"logits": logits, "position": positions, "rows_per_sequence": rows}
    given |= {name: empty(batch * rows, groups, dtype=torch.float32) for name in ("group_max", "group_noise")}
    given |= {name: empty(batch * rows, tiles, dtype=torch.float32) for name in ("tile_max", "tile_sum")}
    given["tile_weight"] = empty(batch * rows, tiles, dtype=torch.int64)
    run(uses.sample_tiles(vocab), (tiles, batch * rows), **given)
    sampled, logprob = empty(batch, rows, dtype=torch.int64), empty(batch, rows, dtype=torch.float32)
    run(
        uses.sample_select(vocab),
        (batch * rows,),
        **given,
        reach=params.reach,
        top_k=params.top_k,
        shortlist=empty(batch * rows, groups, dtype=torch.int32),
        sampled=sampled,
        logprob=logprob,
    )
    return sampled, logprob


@dataclass(frozen=True)
class Accepted:
    """The result of a round, and the next block if it was asked for: int64 tensors."""

    accepted: torch.Tensor  # [B]
    next_token: torch.Tensor  # [B], -1 if the deciding row had no finite largest logit
    path: torch.Tensor | None = None  # [B, R], the accepted nodes from the anchor down, then -1
    block: torch.Tensor | None = None  # [B, K], [next_token, mask, ...]
    positions: torch.Tensor | None = None  # [B, K]


def accept_block(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    sampled: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    block_size: int | None = None,
    mask_token: int = 0,
    parents: torch.Tensor | None = None,
    run: Run = by_triton,
) -> Accepted:
    """Compare drafted with sampled tokens: contiguous int64 tokens [B, S], rows [B, R], sampled [B, R].

    `parents` [B, R] makes the R nodes a tree. Each node comes after its parent, and siblings have different tokens
    (the first of equal ones is followed). `block_size` asks for the path and the next block, and needs `start` [B].
    """
    batch, nodes = rows.shape
    if max(nodes, block_size or 1) > uses.ACCEPT_NODES:
        most = max(nodes, block_size or 1)
        raise ValueError(f"a block has {most} nodes, expected {uses.ACCEPT_NODES} or fewer")
    made = {name: tokens.new_empty(batch) for name in ("accepted", "next_token")}
    following = {}
    if block_size is not None:
        made["path"] = tokens.new_empty(batch, nodes)
        made |= {name: tokens.new_empty(batch, block_size) for name in ("block", "positions")}
        following = {"start": start}
    run(
        uses.accept_block(block_size=block_size, mask_token=mask_token, tree=parents is not None),
        (batch,),
        tokens=tokens,
        rows=rows,
        sampled=sampled,
        **{} if parents is None else {"parents": parents},
        **following,
        tokens_per_sequence=tokens.shape[1],
        nodes_per_sequence=nodes,
        **made,
    )
    return Accepted(**made)


def decide_round(
    params: Sampling,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    start: torch.Tensor,
    *,
    run: Run = by_triton,
) -> Accepted:
    """A round's decisions from the target's pass, for all requests at once on the device.

    tokens: int64 [B, S] = [anchor, draft, ...], with the anchors at positions `start` [B].
    logits: float32 [B, S, V].
    lengths: [B], tokens of each block that count.

    The result is the same as of `decoding.acceptance.accept` on the host.
    """
    column = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    sampled, _ = sample_rows(logits, params, start[:, None] + 1 + column, run=run)
    drafted = torch.where(column < lengths[:, None], tokens, -1)  # never equal to a sampled token
    return accept_block(drafted, column.contiguous(), sampled, run=run)


class Compaction:
    """Moves rows of caches, given as contiguous tensors [slots, heads, capacity, size] that stay where they are: up to
    `most` at a time.
    """

    def __init__(self, caches: Sequence[torch.Tensor], most: int, run: Run = by_triton) -> None:
        sizes = [rows.shape[3] * rows.element_size() for rows in caches]
        if wrong := [size for size in sizes if size % 4]:
            raise ValueError(f"a row has {wrong[0]} bytes, expected a multiple of 4")
        if not all(rows.is_contiguous() for rows in caches):
            raise ValueError("a cache is not contiguous")
        device = caches[0].device
        self._use, self._run = uses.compact_rows(most), run
        self._caches = caches  # held: the kernel knows their addresses only
        self._most_heads = max(rows.shape[1] for rows in caches)
        self._table = {
            "caches": torch.tensor([rows.data_ptr() for rows in caches], dtype=torch.int64, device=device),
            "heads": torch.tensor([rows.shape[1] for rows in caches], dtype=torch.int32, device=device),
            "words": torch.tensor([size // 4 for size in sizes], dtype=torch.int32, device=device),
        }

    def __call__(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Rows start + nodes[i] of a slot become rows start + i, in every cache. `nodes` rise."""
        device = self._table["caches"].device
        order = torch.tensor(nodes, dtype=torch.int64).to(device, non_blocking=True)
        capacity = self._caches[0].shape[2]
        given = {"nodes": order, "slot": slot, "start": start, "count": len(nodes), "capacity": capacity}
        self._run(self._use, (len(self._caches), self._most_heads), **self._table, **given)


def gather_taps(
    taps: Sequence[torch.Tensor],
    dtype: torch.dtype,
    valid: torch.Tensor | None = None,
    rows: int = 1,
    *,
    run: Run = by_triton,
) -> torch.Tensor:
    """n contiguous tensors [B * rows, D] -> [B * rows, n * D] in `dtype`. Rows from valid[b] on (int64 [B]) are 0."""
    total, hidden = taps[0].shape
    features = torch.empty(total, len(taps) * hidden, dtype=dtype, device=taps[0].device)
    types = TYPE_NAMES[taps[0].dtype], TYPE_NAMES[dtype]
    ragged = {} if valid is None else {"valid": valid}
    use = uses.gather_taps(len(taps), hidden, *types, ragged=bool(ragged))
    run(use, (total, len(taps)), taps=tuple(taps), **ragged, rows_per_sequence=rows, features=features)
    return features


def gated_delta_net(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: torch.Tensor,
    state: torch.Tensor,
    pending_gates: torch.Tensor,
    replayed: torch.Tensor,
    certain: torch.Tensor,
    begun: torch.Tensor,
    *,
    run: Run = by_triton,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`dflash::GatedDeltaNet` (graph/delta_net.py) of contiguous tensors, as many pending rows as `pending_gates` has.

    Returns y, the new state, and the gates that are pending then.
    """
    batch, count, _ = gates.shape
    heads, key_dim, value_dim = state.shape[1:]
    made = v.new_empty(batch, count, v.shape[2]), torch.empty_like(state), torch.empty_like(pending_gates)
    use = uses.delta_rows(q.shape[2] // key_dim, heads, key_dim, value_dim, pending_gates.shape[1])
    given = {"q": q, "k": k, "v": v, "gates": gates, "state": state, "pending_gates": pending_gates}
    given |= {"replayed": replayed, "certain": certain, "begun": begun}
    given |= dict(zip(("y", "state_out", "pending_gates_out"), made, strict=True))
    run(use, (-(-value_dim // uses.DELTA_COLUMNS), batch * heads), **given, count=count)
    return made
