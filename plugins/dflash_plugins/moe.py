"""Launch the MoE kernels on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.launch import TYPE_NAMES, Run, by_triton


@dataclass(frozen=True)
class PackedExperts:
    """A layer's MXFP4 weights as inputs of `dflash::MoE` (graph/experts.py), and its constants."""

    gate_up: torch.Tensor  # [E, 2I, D/32, 16] bytes
    gate_up_scales: torch.Tensor  # [E, 2I, D/32] bytes
    gate_up_bias: torch.Tensor | None  # [E, 2I]
    down: torch.Tensor  # [E, D, I/32, 16] bytes
    down_scales: torch.Tensor  # [E, D, I/32] bytes
    down_bias: torch.Tensor | None  # [E, D]
    k: int
    alpha: float
    beta: float
    limit: float


def route(
    router_logits: torch.Tensor, k: int, run: Run = by_triton
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits float32 [rows, E] -> shares [rows, k], pairs [rows * k], groups [E, 3]; see kernels/moe.py."""
    rows, experts = router_logits.shape
    programs = -(-rows // uses.ROUTE_ROWS)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=router_logits.device)

    shares, chosen, counts = router_logits.new_empty(rows, k), empty(rows, k), empty(programs, experts)
    counted = {"rows": rows, "chosen": chosen, "counts": counts}
    run(uses.route(experts, k), (programs,), router_logits=router_logits, shares=shares, **counted)
    pairs, groups = empty(rows * k), empty(experts, 3)
    run(uses.group(experts, k), (programs,), **counted, pairs=pairs, groups=groups)
    return shares, pairs, groups


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    e: PackedExperts,
    tile: uses.Tile = uses.TILES[0],
    run: Run = by_triton,
) -> torch.Tensor:
    """x [rows, D] bfloat16 or float16, router logits float32 [rows, E] -> [rows, D], all contiguous."""
    rows, hidden = x.shape
    experts, inner, dtype = e.down.shape[0], e.gate_up.shape[1] // 2, TYPE_NAMES[x.dtype]
    in_use = min(experts, rows * e.k)
    shares, pairs, groups = route(router_logits, e.k, run)

    activated = x.new_empty(rows * e.k, inner)
    biased = e.gate_up_bias is not None
    given = {"pairs": pairs, "groups": groups, "activated": activated}
    run(
        uses.gate_up(hidden, inner, e.k, e.alpha, e.beta, e.limit, dtype, biased, tile),
        (-(-inner // tile.block_n), in_use),
        x=x,
        **given,
        blocks=e.gate_up,
        scales=e.gate_up_scales,
        **{"bias": e.gate_up_bias} if biased else {},
    )
    outputs = torch.empty(rows * e.k, hidden, dtype=torch.float32, device=x.device)
    biased = e.down_bias is not None
    run(
        uses.down(hidden, inner, dtype, biased, tile),
        (-(-hidden // tile.block_n), in_use),
        **given,
        shares=shares,
        blocks=e.down,
        scales=e.down_scales,
        **{"bias": e.down_bias} if biased else {},
        outputs=outputs,
    )
    y = torch.empty_like(x)
    blocks = -(-hidden // uses.COMBINE_BLOCK)
    run(uses.combine(hidden, e.k, dtype), (rows, blocks), outputs=outputs, like=x, y=y)
    return y
