"""The frozen target, loaded with Transformers: features at the taps, embedding, LM head; and a file that keeps the
features of each answer, so that a further epoch reads them.

For SmolLM2-135M on a CPU, most of a step's time is the target's pass.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.errors import CheckpointError
from dflash_trt.training.blocks import Batch, Batches

_SHARE = 0.5  # of the disk's free space that the file may take


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
        output = self.decoder(input_ids=tokens, use_cache=False)
        return torch.cat(self._taps, -1), output.last_hidden_state if self._final else None

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


class FeatureStore:
    """FILE has rows [taps * D (+ D with `final`)] in the target's dtype, for every token of every answer in order, and
    FILE.have a byte per answer: whether its rows are there.

    A file that would take more than half of the free space is not made, and every batch is computed.
    """

    def __init__(self, file: Path, target: FrozenTarget, batches: Batches, taps: int, final: int) -> None:
        """taps: the numbers of a row that are features. final: those that the LM head takes, or 0. Raises OSError."""
        self._target, self._taps, width = target, taps, taps + final
        lengths = [min(len(answer.token_ids), batches.max_length) for answer in batches.answers]
        first = [0, *accumulate(lengths)]
        self._places = {
            a.id: (i, first[i], n) for i, (a, n) in enumerate(zip(batches.answers, lengths, strict=True))
        }
        size = first[-1] * width * target.dtype.itemsize
        self.holds = file.exists() or size < _SHARE * shutil.disk_usage(file.parent).free
        if self.holds:
            kept = file.with_name(f"{file.name}.have")
            self._files = file, kept
            fresh = not kept.exists() or kept.stat().st_size != len(lengths) or file.stat().st_size != size
            for path, count in ((file, size), (kept, len(lengths))) if fresh else ():
                with path.open("wb") as empty:
                    empty.truncate(count)
                    # Else a disk that fills has no error: writing to mapped memory kills the process.
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(empty.fileno(), 0, count)
            self._rows = np.memmap(file, np.uint8, "r+").reshape(first[-1], -1)
            self._have = np.memmap(kept, np.uint8, "r+")

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `FrozenTarget.features` for the batch's tokens, except that rows after the end of an answer are zeros."""
        if not self.holds:
            return self._target.features(batch.tokens.to(self._target.device))
        places = [self._places[answer.id] for answer in batch.answers]
        if not all(self._have[number] for number, _, _ in places):
            features, final = self._target.features(batch.tokens.to(self._target.device))
            both = features if final is None else torch.cat((features, final), -1)
            for row, (number, first, count) in zip(both.cpu(), places, strict=True):
                self._rows[first : first + count] = row[:count].contiguous().view(torch.uint8).numpy()
                self._have[number] = 1
        dtype = self._target.dtype
        width = self._rows.shape[1] // dtype.itemsize
        both = torch.zeros(*batch.tokens.shape, width, dtype=dtype)
        for row, (_, first, count) in enumerate(places):
            both[row, :count] = torch.from_numpy(np.array(self._rows[first : first + count])).view(dtype)
        both = both.to(self._target.device)
        taps = self._taps
        return both[..., :taps], both[..., taps:] if width > taps else None

    def remove(self) -> None:
        """Free the disk, once no step asks for features any more."""
        for file in self._files if self.holds else ():
            file.unlink(missing_ok=True)
