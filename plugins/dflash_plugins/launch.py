"""Launch the kernels on torch tensors, for the runtime, tests and benchmarks.

CPU tensors use Triton's interpreter; set TRITON_INTERPRET=1 before anything imports triton. Launches go to torch's
current stream. They allocate their outputs unless these are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernels import acceptance, compaction, sampling
from dflash_plugins.kernels import taps as kernels
from dflash_trt.decoding.params import SamplingParams

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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
    logits: torch.Tensor, params: Sampling, positions: torch.Tensor
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

    partial = (
        empty(batch * rows, groups, dtype=torch.float32),
        empty(batch * rows, groups, dtype=torch.float32),
        empty(batch * rows, tiles, dtype=torch.float32),
        empty(batch * rows, tiles, dtype=torch.float32),
        empty(batch * rows, tiles, dtype=torch.int64),
    )
    sampling.sample_tiles[(tiles, batch * rows)](
        logits,
        params.temperature,
        params.top_p,
        params.seed,
        positions,
        rows,
        *partial,
        **uses.sample_tiles(vocab).launch,
    )
    sampled, logprob = empty(batch, rows, dtype=torch.int64), empty(batch, rows, dtype=torch.float32)
    sampling.sample_select[(batch * rows,)](
        logits,
        params.temperature,
        params.reach,
        params.top_k,
        params.top_p,
        params.seed,
        positions,
        *partial,
        rows,
        empty(batch * rows, groups, dtype=torch.int32),
        sampled,
        logprob,
        **uses.sample_select(vocab).launch,
    )
    return sampled, logprob


@dataclass(frozen=True)
class Acceptance:
    """The result of a round, and the next block: int64 tensors."""

    accepted: torch.Tensor  # [B]
    next_token: torch.Tensor  # [B], -1 if the deciding row had no finite largest logit
    path: torch.Tensor  # [B, R], the accepted nodes from the anchor down, then -1
    block: torch.Tensor  # [B, K], [next_token, mask, ...]
    positions: torch.Tensor  # [B, K]


def accept_block(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    sampled: torch.Tensor,
    start: torch.Tensor,
    *,
    block_size: int,
    mask_token: int,
    parents: torch.Tensor | None = None,
) -> Acceptance:
    """Compare drafted with sampled tokens: contiguous int64 tokens [B, S], rows [B, R], sampled [B, R], start [B].

    `parents` [B, R] makes the R nodes a tree. Each node comes after its parent, and siblings have different tokens
    (the first of equal ones is followed).
    """
    batch, nodes = rows.shape
    if max(nodes, block_size) > uses.ACCEPT_NODES:
        raise ValueError(f"a block has {max(nodes, block_size)} nodes, expected {uses.ACCEPT_NODES} or fewer")
    made = Acceptance(
        accepted=tokens.new_empty(batch),
        next_token=tokens.new_empty(batch),
        path=tokens.new_empty(batch, nodes),
        block=tokens.new_empty(batch, block_size),
        positions=tokens.new_empty(batch, block_size),
    )
    use = uses.accept_block(block_size=block_size, mask_token=mask_token, tree=parents is not None)
    acceptance.accept_block[(batch,)](
        *(tokens, rows, sampled),
        **{"parents": parents} if parents is not None else {},
        start=start,
        tokens_per_sequence=tokens.shape[1],
        nodes_per_sequence=nodes,
        **vars(made),
        **use.launch,
    )
    return made


def decide_round(
    params: Sampling,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    start: torch.Tensor,
    *,
    mask_token: int,
) -> Acceptance:
    """A round's decisions from the target's pass, for all requests at once on the device.

    tokens: int64 [B, S] = [anchor, draft, ...], with the anchors at positions `start` [B].
    logits: float32 [B, S, V].
    lengths: [B], tokens of each block that count.

    The result is the same as of `decoding.acceptance.accept` on the host.
    """
    column = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    sampled, _ = sample_rows(logits, params, start[:, None] + 1 + column)
    drafted = torch.where(column < lengths[:, None], tokens, -1)  # never equal to a sampled token
    rows, block_size = column.contiguous(), tokens.shape[1]
    return accept_block(drafted, rows, sampled, start, block_size=block_size, mask_token=mask_token)


class Compaction:
    """Moves rows of caches, given as contiguous tensors [slots, heads, capacity, size] that stay where they are."""

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        sizes = [rows.shape[3] * rows.element_size() for rows in caches]
        if wrong := [size for size in sizes if size % 4]:
            raise ValueError(f"a row has {wrong[0]} bytes, expected a multiple of 4")
        if not all(rows.is_contiguous() for rows in caches):
            raise ValueError("a cache is not contiguous")
        device = caches[0].device
        self._caches = caches  # held: the kernel knows their addresses only
        self._most_heads = max(rows.shape[1] for rows in caches)
        self._table = (
            torch.tensor([rows.data_ptr() for rows in caches], dtype=torch.int64, device=device),
            torch.tensor([rows.shape[1] for rows in caches], dtype=torch.int32, device=device),
            torch.tensor([size // 4 for size in sizes], dtype=torch.int32, device=device),
        )

    def __call__(self, slot: int, start: int, nodes: Sequence[int]) -> None:
        """Rows start + nodes[i] of a slot become rows start + i, in every cache. `nodes` rise."""
        order = torch.tensor(nodes, dtype=torch.int64).to(self._table[0].device, non_blocking=True)
        compaction.compact_rows[(len(self._caches), self._most_heads)](
            *(*self._table, order, slot, start, len(nodes), self._caches[0].shape[2]),
            **uses.compact_rows(len(nodes)).launch,
        )


def gather_taps(
    taps: Sequence[torch.Tensor], dtype: torch.dtype, valid: torch.Tensor | None = None, rows: int = 1
) -> torch.Tensor:
    """n contiguous tensors [B * rows, D] -> [B * rows, n * D] in `dtype`. Rows from valid[b] on (int64 [B]) are 0."""
    total, hidden = taps[0].shape
    features = torch.empty(total, len(taps) * hidden, dtype=dtype, device=taps[0].device)
    types = TYPE_NAMES[taps[0].dtype], TYPE_NAMES[dtype]
    use = uses.gather_taps(len(taps), hidden, *types, ragged=valid is not None)
    kernels.gather_taps[(total, len(taps))](
        tuple(taps),
        **{"valid": valid} if valid is not None else {},
        rows_per_sequence=rows,
        features=features,
        **use.launch,
    )
    return features
