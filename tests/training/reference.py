"""The loss of `dflash_trt.training.blocks.head_loss` without chunks and without a gradient of its own."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from dflash_trt.training.blocks import weights_of


def plain_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    teacher: Tensor | None = None,
    share: float = 0.0,
) -> Tensor:
    """The result of head_loss, computed directly."""
    logits = F.linear(hidden, head).float()
    flat = logits.flatten(0, 1)
    losses = F.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape) * valid
    weights = weights_of(losses, valid)
    if teacher is not None:
        wanted = F.linear(teacher, head).float().flatten(0, 1).softmax(-1)
        soft = F.cross_entropy(flat, wanted, reduction="none").view(labels.shape) * valid
        losses = (1 - share) * losses + share * soft
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
