"""The frozen target, loaded with Transformers: features at the taps, embedding, LM head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.errors import CheckpointError


def matrix_dtype(device: torch.device) -> torch.dtype:
    """The dtype of products with frozen matrices: BF16 if the hardware supports it, else float32.

    BF16 is up to three times as fast as float32 on a CPU with AMX, and 2.3 times on an AMD EPYC with AVX-512 BF16. On
    one with neither, torch's BF16 reached a fifteenth of float32's speed.
    """
    if device.type == "cpu":
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16


class FrozenTarget:
    """A target checkpoint without gradients. Tap i is the residual stream after layer `taps[i]` (0-based; -1: the
    embedding).

    final: whether the normed rows that the LM head takes are given too. row_scale: as in `DrafterConfig`.

    Raises CheckpointError if Transformers cannot load it, or loads something that differs from the configuration.
    """

    def __init__(
        self,
        directory: Path,
        config: TargetConfig,
        taps: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        final: bool = False,
        row_scale: float | None = None,
    ) -> None:
        try:
            model = _load(directory, dtype)
        except Exception as error:  # the family's code may raise anything
            raise CheckpointError(f"{directory}: Transformers cannot load it: {error}") from error
        model = model.to(device).eval().requires_grad_(False)
        self.decoder = model.get_decoder()
        layers = getattr(self.decoder, "layers", ())
        if len(layers) != config.num_hidden_layers:
            raise CheckpointError(
                f"{directory}: has {len(layers)} layers in Transformers, but {config.num_hidden_layers} in config.json"
            )
        self.device, self.dtype = device, dtype
        self.embedding: Tensor = model.get_input_embeddings().weight
        scale = config.embedding_scale if row_scale is None else row_scale
        self._scale = torch.tensor(scale, dtype=self.embedding.dtype, device=device)
        self.head: Tensor = model.get_output_embeddings().weight.to(dtype)
        self._taps: list[Tensor] = [self.embedding] * len(taps)
        self._final = final
        for place, layer in enumerate(taps):
            tapped = model.get_input_embeddings() if layer == -1 else layers[layer]
            tapped.register_forward_hook(partial(self._tap, place))

    def _tap(self, place: int, module: object, inputs: object, output: Any) -> None:
        self._taps[place] = output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def features(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features [B, T, taps * D] of tokens [B, T], and with `final` the rows [B, T, D] that the LM head takes.

        Tokens are right-padded to T: what is behind a text does not change it.
        """
        made = self.decoder(input_ids=tokens, use_cache=False)
        return torch.cat(self._taps, -1), made.last_hidden_state if self._final else None

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embedded tokens for the drafter: rows as they are stored, without a norm that the target has, scaled."""
        return functional.embedding(tokens, self.embedding) * self._scale


def _load(directory: Path, dtype: torch.dtype) -> Any:
    """The text model, where Transformers has it apart from the parts for images; else the whole model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype, trust_remote_code=False)
