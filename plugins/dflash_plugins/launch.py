"""Launches of the kernels on torch tensors: for the runtime, tests and benchmarks.

On CPU tensors they run in Triton's interpreter (set TRITON_INTERPRET=1 before anything imports triton). Launches go to
torch's current stream and allocate their outputs unless they are given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernels import acceptance, sampling
from dflash_plugins.kernels import taps as kernels
from dflash_trt.decoding.params import SamplingParams

TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Sampling:
    """What the kernels need of B requests, one tensor entry each: see `sampling_tensors`."""

    temperature: torch.Tensor  # [B] float32
    reach: torch.Tensor  # [B] float32, -log(min_p)
    top_k: torch.Tensor  # [B] int32
    top_p: torch.Tensor  # [B] float32
    seed: torch.Tensor  # [B] int64, the bits of an unsigned number


def sampling_tensors(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device | str
) -> Sampling:
    """The parameters of requests as tensors. Penalties are no part of them: apply those to the logits before."""

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
    """Tokens int64 [B, R] and their log-probabilities float32 [B, R] of float32 logits [B, R, V].

    positions: int64 [B, R], of the token that each row predicts. A row with a NaN, an infinite or no finite logit
    gets the token -1 and a NaN.
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
    """What a round commits, and the block that the next one starts from: int64 tensors."""

    accepted: torch.Tensor  # [B]
    next_token: torch.Tensor  # [B], -1 where the deciding row had no finite largest logit
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
    """Drafted against sampled tokens: contiguous int64 tokens [B, S], rows [B, R], sampled [B, R], start [B].

    `parents` [B, R] makes the R nodes a tree; each node comes after its parent, and siblings differ in their tokens
    (of equal ones the first is followed).
    """
    batch, nodes = rows.shape
    made = Acceptance(
        accepted=tokens.new_empty(batch),
        next_token=tokens.new_empty(batch),
        path=tokens.new_empty(batch, nodes),
        block=tokens.new_empty(batch, block_size),
        positions=tokens.new_empty(batch, block_size),
    )
    use = uses.accept_block(nodes, block_size=block_size, mask_token=mask_token, tree=parents is not None)
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
    """A round's decisions from the target's pass: int64 tokens [B, S] = [anchor, draft, ...] whose anchors stand at
    positions `start` [B], float32 logits [B, S, V]. Of a block only the first `lengths` [B] tokens count.

    What `decoding.acceptance.accept` decides on the host, for every request at once and without it.
    """
    column = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    sampled, _ = sample_rows(logits, params, start[:, None] + 1 + column)
    drafted = torch.where(column < lengths[:, None], tokens, -1)  # no token: never the one sampled
    rows, block_size = column.contiguous(), tokens.shape[1]
    return accept_block(drafted, rows, sampled, start, block_size=block_size, mask_token=mask_token)


def gather_taps(
    taps: Sequence[torch.Tensor], dtype: torch.dtype, valid: torch.Tensor | None = None, rows: int = 1
) -> torch.Tensor:
    """n contiguous tensors [B * rows, D] -> [B * rows, n * D] in `dtype`; rows from valid[b] on (int64 [B]) are 0."""
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
