"""The inputs of a round from the result of the one before, on the device: the host reads that result while the round
runs. The host's own decision is `judge` in decoding/acceptance.py, and must be the same.

The host gives the inputs of slots whose requests were not in the round before, and of those without a request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
# What a round makes of the one before: where passes begin, features that the drafter reads, where those of this round
# will wait, and the newest token. The host gives the same names with `given_` before, 0 where the device knows better.
NEXT = ("target_start", "drafter_start", "n_features", "places", "anchors")


def scratch(slots: int, block_size: int, device: torch.device) -> dict[str, Tensor]:
    """Memory of `next_round`, by name."""
    rows = slots * block_size
    sizes = {
        "sound": rows,
        "index": rows,
        "found": rows,
        **dict.fromkeys(("leading", "count", "place", "drafted"), slots),
    }
    memory = {name: torch.zeros(size, dtype=torch.int64, device=device) for name, size in sizes.items()}
    return memory | {"truth": torch.zeros(slots, dtype=torch.bool, device=device)}


def next_round(part: Callable[..., Tensor], n: int, nodes: int, width: int) -> None:
    """Make `NEXT` for the round after one whose chains of `nodes` nodes had `width` rows, for the first n slots. With
    more than one node, the drafter has a pass before it.

    part: gives memory by name and shape (`RoundMemory.part`).

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
    torch.where(torch.le(count, accepted, out=truth), drafted, following, out=part("anchors", n))
    start.add_(count)
    if nodes == 1:
        places.add_(count.mul_(reads))
    else:
        read = torch.mul(count, reads, out=part("n_features", n))
        torch.sub(start, read, out=part("drafter_start", n))


def go_on(part: Callable[..., Tensor], n: int, nodes: int, width: int, places: Tensor) -> None:
    """Draft what texts say after `next_round`, in place of the drafter's tokens [n, width]: `texts` [n, 2 * nodes - 1]
    go on after the anchors of the round before. Where the new anchor is another token than theirs, the drafts stay.

    places: 0 .. nodes - 1.
    """
    texts, tokens, found = part("texts", n, 2 * nodes - 1), part("tokens", n, width), part("found", n, nodes)
    last = torch.clamp(part("count", n), min=1, out=part("place", n)).sub_(1)
    torch.gather(texts, 1, torch.add(last[:, None], places, out=part("index", n, nodes)), out=found)
    right = torch.eq(found[:, :1], part("anchors", n, 1), out=part("truth", n, 1))
    drafts = tokens[:, 1:nodes]
    torch.where(right, found[:, 1:], drafts, out=drafts)
    tokens[:, nodes:] = tokens[:, nodes - 1 : nodes]
