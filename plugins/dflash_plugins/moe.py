"""Launch the MoE kernels on torch tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_plugins import kernel_specs as uses
from dflash_plugins.kernels import moe as kernels
from dflash_plugins.launch import TYPE_NAMES


@dataclass(frozen=True)
class Experts:
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


def route(router_logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits float32 [rows, E] -> shares [rows, k], pairs [rows * k], groups [E, 3]; see kernels/moe.py."""
    rows, experts = router_logits.shape
    programs = -(-rows // uses.ROUTE_ROWS)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=router_logits.device)

    shares, chosen, counts = router_logits.new_empty(rows, k), empty(rows, k), empty(programs, experts)
    kernels.route[(programs,)](
        router_logits, rows, *(shares, chosen, counts), **uses.route(experts, k).launch
    )
    pairs, groups = empty(rows * k), empty(experts, 3)
    kernels.group[(programs,)](chosen, counts, rows, pairs, groups, **uses.group(experts, k).launch)
    return shares, pairs, groups


def moe(
    x: torch.Tensor, router_logits: torch.Tensor, e: Experts, tile: uses.Tile = uses.TILES[0]
) -> torch.Tensor:
    """x [rows, D] bfloat16 or float16, router logits float32 [rows, E] -> [rows, D], all contiguous."""
    rows, hidden = x.shape
    experts, inner, dtype = e.down.shape[0], e.gate_up.shape[1] // 2, TYPE_NAMES[x.dtype]
    in_use = min(experts, rows * e.k)
    shares, pairs, groups = route(router_logits, e.k)

    activated = x.new_empty(rows * e.k, inner)
    biased = e.gate_up_bias is not None
    use = uses.gate_up(hidden, inner, e.k, e.alpha, e.beta, e.limit, dtype, biased, tile)
    kernels.gate_up[(-(-inner // tile.block_n), in_use)](
        *(x, pairs, groups, e.gate_up, e.gate_up_scales),
        **{"bias": e.gate_up_bias} if biased else {},
        activated=activated,
        **use.launch,
    )
    outputs = torch.empty(rows * e.k, hidden, dtype=torch.float32, device=x.device)
    biased = e.down_bias is not None
    kernels.down[(-(-hidden // tile.block_n), in_use)](
        *(activated, shares, pairs, groups, e.down, e.down_scales),
        **{"bias": e.down_bias} if biased else {},
        outputs=outputs,
        **uses.down(hidden, inner, dtype, biased, tile).launch,
    )
    y = torch.empty_like(x)
    blocks = -(-hidden // uses.COMBINE_BLOCK)
    kernels.combine[(rows, blocks)](outputs, x, y, **uses.combine(hidden, e.k, dtype).launch)
    return y
