"""Random checkpoints of Qwen3-Next and Qwen3.5 as Transformers itself writes them, and as it reads them.

Weights are drawn as in checkpoints.py: logits have order 10. States forget slowly, so that earlier rows matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.mtp import own_drafter
from tests.doubles.checkpoints import IM_END, VOCAB, draw, save_drawn

NEXT = "Qwen3NextForCausalLM"
DENSE, SPARSE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
IMAGES, SPARSE_IMAGES = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_CONFIGS = {
    NEXT: "Qwen3NextConfig", DENSE: "Qwen3_5TextConfig", SPARSE: "Qwen3_5MoeTextConfig", IMAGES: "Qwen3_5Config",
    SPARSE_IMAGES: "Qwen3_5MoeConfig",
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 4096, "eos_token_id": IM_END,
    "bos_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def make_hybrid(
    directory: Path,
    architecture: str = DENSE,
    *,
    seed: int = 0,
    favourites: int = 0,
    prediction: bool = False,
    stacked: bool = False,
    **fields: Any,
) -> Path:
    """Write a random checkpoint. `fields` replace fields of the text model's config.json.

    prediction: add a layer of multi-token prediction, which published checkpoints have.
    stacked: store each layer's experts as two tensors, as Qwen3.5 is published.
    """
    text = SMALL | ({} if architecture in (DENSE, IMAGES) else EXPERTS)
    if architecture in (DENSE, IMAGES, NEXT):
        text = text | {"intermediate_size": 96}
    text = text | fields
    images = architecture in (IMAGES, SPARSE_IMAGES)
    tie = text.get("tie_word_embeddings", False)
    settings = {"text_config": text, "vision_config": _VISION, "tie_word_embeddings": tie} if images else text
    model = getattr(transformers, architecture)(getattr(transformers, _CONFIGS[architecture])(**settings))
    save_drawn(model, directory, _draw, seed=seed, favourites=favourites)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if stacked:
        tensors = _stack(tensors)
    if prediction:
        tensors |= _prediction(tensors, text["hidden_size"], seed)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def _prediction(tensors: dict[str, torch.Tensor], hidden: int, seed: int) -> dict[str, torch.Tensor]:
    """`mtp.*`: fc, norms, and a layer like the target's first one with attention."""
    generator = torch.Generator().manual_seed(seed + 100)
    layer = min(name.partition("self_attn.")[0] for name in tensors if "self_attn." in name)
    shapes = {
        "mtp.fc.weight": torch.Size([hidden, 2 * hidden]),
        **dict.fromkeys(
            (f"mtp.{name}.weight" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")),
            torch.Size([hidden]),
        ),
        **{
            f"mtp.layers.0.{name.removeprefix(layer)}": tensor.shape
            for name, tensor in tensors.items()
            if name.startswith(layer)
        },
    }
    dtype = next(iter(tensors.values())).dtype
    return {name: _draw(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def own(out: Path, target: Path) -> Path:
    """The drafter in the target's checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_TRT_CACHE", str(out))
        return own_drafter(target)


def load_hybrid(directory: Path) -> Any:
    """The text model as Transformers reads it, in float32."""
    config = json.loads((directory / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith("norm.weight"):  # the stored weight is less by 1
        return draw(name, shape, generator) - 1
    if name.endswith("A_log"):
        return torch.log(torch.rand(shape, generator=generator) * 0.5 + 0.005)
    if name.endswith("dt_bias"):
        return 0.5 * noise - 1
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    return draw(name, shape, generator)


def _stack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for mlp in sorted({name.partition("experts.")[0] for name in tensors if ".experts." in name}):
        count = sum(name.startswith(f"{mlp}experts.") for name in tensors) // 3

        def each(kind: str, mlp: str = mlp, count: int = count) -> list[torch.Tensor]:
            return [tensors[f"{mlp}experts.{e}.{kind}_proj.weight"] for e in range(count)]

        found[f"{mlp}experts.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(each("gate"), each("up"), strict=True)]
        )
        found[f"{mlp}experts.down_proj"] = torch.stack(each("down"))
    return found
