"""The frozen target, loaded with Transformers: features at the taps, embedding, LM head. Also a feature cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.errors import CheckpointError, DFlashError
from dflash_trt.training.answers import Answer
from dflash_trt.training.state import write_tensors


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

    With `final`, the features end in one part more: the normed rows that the LM head takes. row_scale: as in
    `DrafterConfig`.

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
            tapped.register_forward_hook(self._tap(place))

    def _tap(self, place: int) -> Any:
        def hook(module: object, inputs: object, output: Any) -> None:
            self._taps[place] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """[B, T, taps * D] of tokens [B, T], right-padded to T: what is behind a text does not change it.

        With `final`, [B, T, (taps + 1) * D].
        """
        made = self.decoder(input_ids=tokens, use_cache=False)
        return torch.cat([*self._taps, *([made.last_hidden_state] if self._final else [])], -1)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """The taps' part of the features, and that of the final rows if there is one."""
        if not self._final:
            return features, None
        size = self.head.shape[1]
        return features[..., :-size], features[..., -size:]

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


class FeatureCache:
    """Features of answers on disk, [T, taps * D] in BF16. Each answer has a safetensors file, named after its tokens.

    `key` describes the features. A folder with features of another target or of other taps is refused.
    """

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        label = folder / "features.json"
        if label.exists():
            held = json.loads(label.read_text(encoding="utf-8"))
            if held != key:
                raise DFlashError(
                    f"{label}: holds features of {held}, not of {key}; choose another --features"
                )
        else:
            if any(file.suffix != ".part" for file in folder.iterdir()) and not label.exists():
                raise DFlashError(
                    f"{folder}: is not empty and is not a feature cache; choose another --features"
                )
            partial = label.with_suffix(f".{os.getpid()}.part")  # several processes may begin at once
            partial.write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
            partial.replace(label)
        self.folder = folder

    def get(self, answer: Answer, length: int) -> Tensor | None:
        """Features of the answer's first `length` tokens; None if they are not there."""
        file = self._file(answer, length)
        return load_file(file)["features"] if file.exists() else None

    def put(self, answer: Answer, length: int, features: Tensor) -> None:
        """Store `features` of the answer's first `length` tokens."""
        file = self._file(answer, length)
        partial = file.with_suffix(f".{os.getpid()}.part")
        write_tensors({"features": features[:length].to("cpu", torch.bfloat16).contiguous()}, partial)
        partial.rename(file)

    def _file(self, answer: Answer, length: int) -> Path:
        text = ",".join(map(str, answer.token_ids[:length]))
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.safetensors"
