"""The inputs of a round from the result of the one before, on the device: the host reads that result while the round
runs. The host's own decision is `judge` in decoding/acceptance.py, and must be the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


def scratch(slots: int, block_size: int, device: torch.device) -> dict[str, Tensor]:
    """Memory of `next_round`, by name."""
    sizes = {"sound": slots * block_size, **dict.fromkeys(("leading", "count", "place", "drafted"), slots)}
    memory = {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()}
    return memory | {"truth": torch.zeros(slots, dtype=torch.bool, device=device)}


def next_round(part: Callable[..., Tensor], n: int, nodes: int, width: int, block: Tensor | None) -> None:
    """Make the inputs of the round after one whose chains of `nodes` nodes had `width` rows, for the first n slots.

    part: gives memory by name and shape (`RoundMemory.part`). block: the anchors of the drafter's block [n], if it has
    a pass.

    A slot commits the accepted nodes that count, up to the first whose logits are not finite. Its anchor is the node
    after them, if one was accepted, else the token that the target decided.
    """
    accepted, following, limits, reads = (part(x, n) for x in ("accepted", "next_token", "limits", "reads"))
    tokens, start, places = part("tokens", n, width), part("target_start", n), part("places", n)
    sound, truth = part("sound", n, width), part("truth", n)
    leading, count, place, drafted = (part(x, n) for x in ("leading", "count", "place", "drafted"))
    torch.cumprod(part("finite", n, width), 1, dtype=torch.int64, out=sound)
    torch.sum(sound, 1, out=leading)
    torch.add(accepted, torch.ge(following, 0, out=truth), out=count)  # without a token, one node less
    torch.minimum(count, limits, out=count).clamp_(max=nodes)
    torch.minimum(count, leading, out=count)
    torch.clamp(count, max=width - 1, out=place)
    torch.gather(tokens, 1, place[:, None], out=drafted[:, None])
    anchor = torch.where(torch.le(count, accepted, out=truth), drafted, following, out=place)
    start.add_(count)
    if block is None:
        tokens.copy_(anchor[:, None].expand(tokens.shape))
        places.add_(count.mul_(reads))
    else:
        block.copy_(anchor)
        read = torch.mul(count, reads, out=part("n_features", n))
        torch.sub(start, read, out=part("drafter_start", n))
