"""The DFlash2 drafter in torch for training: DFlash's network with convolutions, and the selector of candidates.

It begins as the drafter that it has weights of. If that is a DFlash drafter, convolutions pass a row on, and the
selector adds nothing. The selector's codebooks are projections of the target's embedding here, and are multiplied out
in a checkpoint. Of a DFlash2 drafter, what no projection gives of its codebooks is added, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_trt.checkpoint.schema import DrafterConfig
from dflash_trt.models.drafters.dflash2 import DFlash2
from dflash_trt.training.model import DrafterModel, Layer

_ROWS = 1024  # the selector learns from every n-th row of a step: from so many, and less than twice as many
_STEP = 256  # their number is a multiple of it: torch keeps compiled products of every shape that it has seen
_CODEBOOKS = ("predecessor", "successor")


class _Convolution(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.size, self.group = config.block_size, config.settings.group
        self.base_kernel = nn.Parameter(torch.zeros(2, 2, config.hidden_size))
        self.kernel_projection = nn.Linear(
            config.hidden_size, 4 * config.hidden_size // self.group, bias=False
        )
        nn.init.zeros_(self.kernel_projection.weight)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1

    def kernels(self, u: Tensor) -> Tensor:
        """[2, 2, B, Q, D], before and after the sublayer with the input u [B, Q, D], for a row and the one before."""
        varying = self.kernel_projection(u).unflatten(-1, (2, 2, -1)).repeat_interleave(self.group, -1)
        return varying.permute(2, 3, 0, 1, 4) + self.base_kernel[:, :, None, None]

    def mix(self, kernels: Tensor, y: Tensor) -> Tensor:
        """Rows y [B, Q, D] of blocks; the first row of a block has none before it."""
        blocks = y.unflatten(1, (-1, self.size))
        before = F.pad(blocks[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)
        return (kernels[0] * y + kernels[1] * before).to(y.dtype)


class _DFlash2Layer(Layer):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.attention_conv = _Convolution(config)
        self.mlp_conv = _Convolution(config)

    def sublayer(self, name: str, u: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        convolution = self.get_submodule(f"{name}_conv")
        kernels = convolution.kernels(u)
        return convolution.mix(kernels[1], run(convolution.mix(kernels[0], u)))


class _Selector(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, rank = config.hidden_size, config.settings.rank
        self.hidden_projection = nn.Linear(size, rank, bias=False)
        self.predecessor = nn.Linear(size, rank, bias=False)
        self.successor = nn.Linear(size, rank, bias=False)
        nn.init.zeros_(self.successor.weight)
        for book in _CODEBOOKS:  # float32 [V, rank], what is added to the projected embedding
            self.register_buffer(f"{book}_rest", None, persistent=False)

    @torch.no_grad()
    def start_from(self, codebooks: Mapping[str, Tensor], embedding: Tensor) -> None:
        """Projections by least squares of the embedding [V, D] to codebooks [V, rank], and what they leave."""
        wide = embedding.float()
        squares = (wide.T @ wide).double()
        squares.diagonal().add_(1e-6 * squares.diagonal().mean())
        for book, codes in codebooks.items():
            codes = codes.to(wide)
            projection = torch.linalg.solve(squares, (wide.T @ codes).double()).float()
            self.get_parameter(f"{book}.weight").copy_(projection.T)
            setattr(self, f"{book}_rest", codes - wide @ projection)

    def rest(self, book: str, ids: Tensor) -> Tensor | float:
        """Of the codes of these tokens, what is not projected."""
        rest: Tensor | None = getattr(self, f"{book}_rest")
        return 0.0 if rest is None else F.embedding(ids, rest.to(ids.device))


@dataclass(frozen=True)
class Selection:
    """The task of the selector in a step: tokens, valid [N, K] as in the loss, head and embedding [V, D] of the target.

    With teacher [N, K, D], the target's normed rows, `share` of the wanted distribution over the candidates is the
    target's.
    """

    tokens: Tensor
    valid: Tensor
    head: Tensor
    embedding: Tensor
    teacher: Tensor | None = None
    share: float = 0.0


class DFlash2Drafter(DrafterModel):
    """The drafter with the weights of a DFlash or DFlash2 drafter, or with new ones."""

    layer_type = _DFlash2Layer
    selects = True

    def __init__(self, config: DrafterConfig, weights: Mapping[str, Tensor] | None = None) -> None:
        assert isinstance(config.settings, DFlash2)
        super().__init__(config, None)
        self.candidate_selector = _Selector(config)
        self._codebooks: dict[str, Tensor] = {}
        if weights is not None:
            # A confidence head is of the rows before this training.
            floats = {n: w.float() for n, w in weights.items() if "confidence_head" not in n}
            names = {book: f"candidate_selector.{book}_codebook" for book in _CODEBOOKS}
            self._codebooks = {book: floats.pop(name) for book, name in names.items() if name in floats}
            missing, unknown = self.load_state_dict(floats, strict=False)
            parts = ("_conv.", "candidate_selector.")
            if unknown or (missing := [name for name in missing if not any(part in name for part in parts)]):
                raise RuntimeError(f"unknown: {unknown[:4]}, missing: {missing[:4]}")
        if not self._codebooks:
            self._scale_selector(1.0, 1.0)

    def _initialize(self) -> None:
        super()._initialize()
        for name, parameter in self.named_parameters():
            if "kernel_projection" in name:
                nn.init.zeros_(parameter)

    def start_selector(self, embedding: Tensor) -> None:
        """With the target's embedding [V, D]: the codebooks of the weights, or new ones of its scale."""
        if self._codebooks:
            self.candidate_selector.start_from(self._codebooks, embedding)
            self._codebooks = {}  # as large as an embedding
        else:
            inputs = embedding, self.norm.weight
            self._scale_selector(*(float(x.detach().float().square().mean().sqrt()) for x in inputs))

    def _scale_selector(self, embedded: float, hidden: float) -> None:
        """New projections for inputs of these root mean squares: their products have order 1."""
        size, selector = self.config.hidden_size, self.candidate_selector
        nn.init.normal_(selector.predecessor.weight, std=size**-0.5 / embedded)
        nn.init.normal_(selector.hidden_projection.weight, std=size**-0.5 / hidden)

    def published(self, weights: Mapping[str, Tensor], embedding: Tensor) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint, from those of a state: codebooks [V, rank] in place of projections."""
        tensors, name = dict(weights), "candidate_selector"
        wide = embedding.detach().float().cpu()
        for book in _CODEBOOKS:
            projection = tensors.pop(f"{name}.{book}.weight").float().cpu()
            rest = self.candidate_selector.rest(book, torch.arange(len(wide)))
            tensors[f"{name}.{book}_codebook"] = wide @ projection.T + rest
        return tensors

    def forward(self, *inputs: Any, selection: Selection | None = None, **named: Any) -> Any:
        """As DFlash's; with a `selection`, the selector's loss too: cross entropy of the true token among candidates.

        The predecessor is the true one. If the true token is not among them, a row has only the teacher's share.
        """
        rows = super().forward(*inputs, **named)
        return rows if selection is None else (rows, self._selector_loss(rows, selection))

    def _selector_loss(self, rows: Tensor, s: Selection) -> Tensor:
        size, selector = self.config.block_size, self.candidate_selector
        flat = rows.reshape(-1, size, rows.shape[-1])
        block, place = s.valid.nonzero(as_tuple=True)
        step = max(1, len(block) // _ROWS)
        block, place = block[::step], place[::step]
        rest = -len(block) % _STEP
        counted = F.pad(torch.ones_like(block, dtype=torch.bool), (0, rest))[:, None]
        block, place = F.pad(block, (0, rest)), F.pad(place, (0, rest), value=1)
        hidden = flat[block, place]
        with torch.no_grad():
            best = (hidden.to(s.head.dtype) @ s.head.T).float().topk(self.config.settings.top_k)
            logits, cap = best.values * self.config.settings.multiplier, self.config.logit_softcap
            logits = logits if cap is None else cap * (logits / cap).tanh()
        hits = (best.indices == s.tokens[block, place][:, None]) & counted
        dtype = hidden.dtype
        newest = s.tokens[block, place - 1]
        before = selector.predecessor(F.embedding(newest, s.embedding).to(dtype))
        weights = selector.hidden_projection(hidden) * (before + selector.rest("predecessor", newest))
        query = weights @ selector.successor.weight.to(weights.dtype)  # [N, D]
        fit = torch.einsum(
            "nd,nkd->nk", query, F.embedding(best.indices, s.embedding).to(query.dtype)
        ).float()
        fit = fit + (weights.float()[:, None] * selector.rest("successor", best.indices)).sum(-1)
        scores, wanted = (logits + fit).log_softmax(-1), hits.float()
        if s.teacher is not None:
            teacher = s.teacher[block, place].to(s.head.dtype)
            likely = torch.einsum("nd,nkd->nk", teacher, s.head[best.indices]).float().softmax(-1)
            wanted = (1 - s.share) * wanted + s.share * likely * counted
        return -(scores * wanted).sum() / wanted.sum().clamp(min=1)
