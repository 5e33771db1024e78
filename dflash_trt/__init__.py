"""DFlash for TensorRT and ONNX Runtime: block-diffusion speculative decoding."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dflash_trt.errors import DFlashError
from dflash_trt.version import __version__

if TYPE_CHECKING:
    from dflash_trt.async_llm import AsyncLLM
    from dflash_trt.decoding.params import SamplingParams
    from dflash_trt.decoding.results import Chunk, Completion, Statistics
    from dflash_trt.decoding.sampling.structure import StructuredOutputs
    from dflash_trt.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Completion",
    "DFlashError",
    "SamplingParams",
    "Statistics",
    "StructuredOutputs",
    "__version__",
]

# Each of these libraries reports its use to its maker unless its variable is set when it is imported. Other processes
# inherit the variables. A value that the user has set stays.
for _variable in ("ORT_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY", "TRTLLM_NO_USAGE_STATS"):
    os.environ.setdefault(_variable, "1")

_HOME = {
    "LLM": "dflash_trt.llm",
    "AsyncLLM": "dflash_trt.async_llm",
    "Chunk": "dflash_trt.decoding.results",
    "Completion": "dflash_trt.decoding.results",
    "SamplingParams": "dflash_trt.decoding.params",
    "Statistics": "dflash_trt.decoding.results",
    "StructuredOutputs": "dflash_trt.decoding.sampling.structure",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the command line starts without loading an engine.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dflash_trt' has no attribute {name!r}")
