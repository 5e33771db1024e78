"""The installed tensorrt_llm: check that it agrees with a bundle, and open an LLM from the bundle."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import yaml

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.engines.packages import installation
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import DFlashError
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)

# Modules that a backend of the drafter's attention imports, with their packages: NVIDIA/TensorRT-LLM, pull requests
# 16914 and 18553. It does so when the drafter is made, after minutes of loading.
_NEEDS = {
    "VANILLA": {"flash_attn": "flash-attn"},
    "FA4": {"flash_attn.cute": "flash-attn", "flashinfer": "flashinfer-python"},
    "TRTLLM": {"flashinfer": "flashinfer-python"},
}
# Sections of llm_args.yaml and their classes.
_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
}
_DRAFTING = {"DFlash": "DFlashDecodingConfig", "SA": "SADecodingConfig"}  # by decoding_type


def _constructed(api: Any, llm_args: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with a section's class for each section, which checks its fields and values.

    Raises ValueError naming all that the installed classes refuse.
    """
    refused = [
        f"{key} is not a field of its TorchLlmArgs"
        for key in llm_args
        if key not in api.TorchLlmArgs.model_fields
    ]
    args = dict(llm_args)
    drafting = _DRAFTING[llm_args["speculative_config"]["decoding_type"]]
    for section, name in {**_SECTIONS, "speculative_config": drafting}.items():
        if llm_args.get(section) is None:
            continue
        try:
            args[section] = getattr(api, name)(**llm_args[section])
        except (AttributeError, TypeError, ValueError) as error:
            refused.append(f"{section}: {error}")
    if refused:
        raise ValueError("; ".join(refused))
    return args


def read_llm_args(bundle: Bundle) -> dict[str, Any]:
    """The bundle's configuration. Raises DFlashError if it requests to run Python code of the checkpoint."""
    file = bundle.path / "llm_args.yaml"
    args: dict[str, Any] = yaml.safe_load(file.read_text())
    if args.get("trust_remote_code"):
        raise DFlashError(
            f"{file}: trust_remote_code is {args['trust_remote_code']!r}; code of a checkpoint is never run"
        )
    return args


def load(bundle: Bundle) -> tuple[Any, Any]:
    """The package, and its LLM for this bundle.

    Raises DFlashError, before anything is loaded, if the package is missing or would refuse the configuration, or if
    the drafter's attention lacks a package. Warns if the package is another release than the bundle's, but accepts the
    configuration.
    """
    version = bundle.manifest["tensorrt_llm"]["version"]
    try:
        module: Any = importlib.import_module("tensorrt_llm")
    except Exception as error:  # its native parts may raise anything
        raise DFlashError(
            f"tensorrt_llm cannot be imported ({type(error).__name__}: {error}); this bundle is for {version}: "
            f"{installation(engine_of(bundle), bundle.manifest)}"
        ) from error
    args = read_llm_args(bundle)
    backend = args["speculative_config"].get("attention_backend")
    for needed, package in _NEEDS[backend].items() if backend else ():
        try:
            importlib.import_module(needed)
        except Exception as error:  # native parts may raise anything
            raise DFlashError(
                f"{bundle.path}: the drafter's attention_backend is {backend}, but {needed} cannot be imported "
                f"({error}); pip install {package}"
            ) from None
    if "drafter" in bundle.roles:
        args["speculative_config"]["speculative_model"] = str((bundle.path / "drafter").resolve())
    try:
        args = _constructed(module.llmapi, args)
    except ValueError as error:
        raise DFlashError(
            f"{bundle.path / 'llm_args.yaml'}: made for TensorRT-LLM {version}, but {module.__version__} is "
            f"installed: {error}. Install {version}"
        ) from None
    if module.__version__ != version:
        warn_once(
            _log,
            f"{bundle.path}: made for TensorRT-LLM {version}, {module.__version__} is installed; it knows every field",
        )
    model = str((bundle.path / "target").resolve())
    return module, module.LLM(model=model, skip_tokenizer_init=True, **args)
