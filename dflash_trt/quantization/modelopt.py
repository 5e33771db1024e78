"""Calibration by NVIDIA's Model Optimizer, on torch and Transformers: static scales, and AWQ for int4."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from dflash_trt.checkpoint.tensors import Checkpoint
from dflash_trt.errors import BuildError
from dflash_trt.workspace import workspace

from .convert import copy_files, data_free, linear_layers

# Scheme -> the name of Model Optimizer's configuration.
CONFIGURATIONS = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG", "int4": "INT4_AWQ_CFG"}


def quantize_with_modelopt(
    source: Path, out: Path, scheme: str, prompts: Sequence[Sequence[int]], *, exclude: Sequence[str] = ()
) -> Path:
    """Write the target in `source` to `out`, as Model Optimizer calibrates it on `prompts` (token ids) and exports it.

    The model is held in BF16, whole, on the CPU. `exclude` as in `quantize`.

    Raises BuildError where torch, Transformers or nvidia-modelopt are missing, or the scheme is not one it calibrates.
    """
    if scheme not in CONFIGURATIONS:
        raise BuildError(
            f"--scheme {scheme}: --calibrator modelopt is for {', '.join(CONFIGURATIONS)}; {scheme} is of weights only"
        )
    try:
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
        mtq = importlib.import_module("modelopt.torch.quantization")
        export = importlib.import_module("modelopt.torch.export").export_hf_checkpoint
    except ImportError as error:
        raise BuildError(
            f"--calibrator modelopt needs torch, transformers and nvidia-modelopt ({error}): pip install "
            "'dflash-trt[quantize]' (torch first, from the index for your CPU or GPU)"
        ) from error
    if out.exists():
        raise BuildError(f"{out}: exists; choose another --out")
    config: dict[str, Any] = deepcopy(getattr(mtq, CONFIGURATIONS[scheme]))
    config["quant_cfg"] += [
        {"quantizer_name": f"{pattern}.*quantizer", "enable": False} for pattern in exclude
    ]
    if scheme == "int4":
        layers = linear_layers(Checkpoint(source), exclude)
        group = data_free(scheme, inputs=[tensor.shape[1] for tensor in layers.values()]).group_size
        for entry in config["quant_cfg"]:
            if "block_sizes" in (entry.get("cfg") or {}):
                entry["cfg"]["block_sizes"][-1] = group
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            for prompt in prompts:
                model(torch.tensor([list(prompt)]))

    with workspace(out) as work:
        model = mtq.quantize(model, config, calibrate)
        export(model, export_dir=work)
        copy_files(source, work)
        work.rename(out)
    return out
