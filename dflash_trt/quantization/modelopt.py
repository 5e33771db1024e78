"""Calibrate with NVIDIA's Model Optimizer, on torch and Transformers: static scales, and AWQ for int4."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from dflash_trt.bundle.workspace import workspace
from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.checkpoint.writer import copy_beside
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.extras import install
from dflash_trt.formats import FORMATS
from dflash_trt.prompts import read_prompts
from dflash_trt.quantization.layers import QuantizationRecipe, linear_layers
from dflash_trt.text.tokenizer import Tokenizer

PROMPT_TOKENS = 1024
AWQ_TOKENS, AWQ_ROW = 4096, 1024
_EXPERT = re.compile(r"\.experts\.\d+\.(?=(gate|up|down)_proj$)")


def calibration_set(directory: Path, file: Path | None) -> list[list[int]]:
    """Token ids of the prompts in a JSONL file, or of the shipped prompts, by the target's tokenizer."""
    tokenizer = Tokenizer(directory)
    prompts = (prompt.token_ids(tokenizer)[:PROMPT_TOKENS] for prompt in read_prompts(file, 0))
    return [ids for ids in prompts if ids]


def quantize_with_modelopt(
    source: Path, out: Path, scheme: str, prompts: Sequence[Sequence[int]], *, exclude: Sequence[str] = ()
) -> Path:
    """Write the target in `source` to `out`, calibrated by Model Optimizer on `prompts` (token ids) and exported.

    The whole model is held in BF16 on the CPU. `exclude` is as in `quantize`. AWQ, the calibration of int4,
    multiplies every layer eleven times per row of tokens. It gets only the first AWQ_TOKENS of the concatenated
    prompts.

    Raises BuildError if torch, Transformers or nvidia-modelopt is missing, or if the scheme cannot be calibrated.
    """
    checkpoint = Checkpoint(source)
    _check(checkpoint, scheme)
    disabled = _disabled(checkpoint, exclude)
    try:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
        mtq = importlib.import_module("modelopt.torch.quantization")
        export = importlib.import_module("modelopt.torch.export").export_hf_checkpoint
    except ImportError as error:
        raise BuildError(
            f"--calibration needs torch, transformers and nvidia-modelopt ({error}): "
            f"{install('quantize')} (torch first, from the index for your CPU or GPU)"
        ) from error
    config: dict[str, Any] = deepcopy(getattr(mtq, str(FORMATS[scheme].modelopt_config)))
    config["quant_cfg"] += [{"quantizer_name": pattern, "enable": False} for pattern in disabled]
    if scheme == "int4":
        tokens = [token for prompt in prompts for token in prompt][:AWQ_TOKENS]
        prompts = [tokens[i : i + AWQ_ROW] for i in range(0, len(tokens), AWQ_ROW)]
        inputs = [tensor.shape[1] for tensor in linear_layers(checkpoint, exclude).values()]
        for entry in config["quant_cfg"]:
            if "block_sizes" in (entry.get("cfg") or {}):
                entry["cfg"]["block_sizes"][-1] = QuantizationRecipe(scheme).algorithm(inputs).group_size

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            for prompt in prompts:
                model(torch.tensor([list(prompt)]))

    with workspace(out) as place:
        place.check_free()
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
        model = mtq.quantize(model, config, calibrate)
        export(model, export_dir=place.path)
        copy_beside(source, place.path)
        place.publish()
    return out


def _check(checkpoint: Checkpoint, scheme: str) -> None:
    """Refuse what Model Optimizer cannot calibrate."""
    if FORMATS[scheme].modelopt_config is None:
        calibrated = ", ".join(name for name, form in FORMATS.items() if form.modelopt_config)
        raise UsageError(
            f"--scheme {scheme}: --calibration is for {calibrated}; {scheme} quantizes weights only"
        )
    if scheme == "int4" and any(_EXPERT.search(name) for name in linear_layers(checkpoint)):
        raise BuildError(
            f"{checkpoint.directory}: nvidia-modelopt 0.47 cannot export experts from AWQ with Transformers 5; "
            "quantize to int4 without --calibration"
        )
    if any(name.endswith("_blocks") for name in checkpoint.tensors):
        raise BuildError(
            f"{checkpoint.directory}: has experts in MXFP4, which Transformers would widen for Model Optimizer; "
            "quantize without --calibration, which leaves them as they are"
        )


def _disabled(checkpoint: Checkpoint, exclude: Sequence[str]) -> list[str]:
    """The names of the quantizers that `exclude` disables. Transformers holds gate and up of all experts as one
    tensor.
    """
    kept, left = linear_layers(checkpoint, exclude), dict[str, set[str]]()
    for name in [name for name in linear_layers(checkpoint) if name not in kept]:
        expert = _EXPERT.search(name)
        whole = "down_proj" if expert and expert[1] == "down" else "gate_up_proj"
        quantizer = f"{name[: expert.start()]}.experts.{whole}*" if expert else f"{name}.*quantizer"
        left.setdefault(quantizer, set()).add(expert[1] if expert else name)
    for quantizer, names in left.items():
        if names in ({"gate"}, {"up"}):
            raise UsageError(
                f"--exclude leaves {names.pop()} projections of {quantizer.partition('.gate_up')[0]} as they are, but "
                "Model Optimizer quantizes gate and up as one: leave both, or quantize without --calibration"
            )
    return list(left)
