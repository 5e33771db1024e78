"""The installed tensorrt_llm: check that it agrees with a bundle, and open an LLM from the bundle."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import yaml

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.errors import DFlashError
from dflash_trt.logs import warn_once
from dflash_trt.trtllm.attention import choose

_log = logging.getLogger(__name__)

# Sections of llm_args.yaml and their classes.
_SECTIONS = {
    "kv_cache_config": "KvCacheConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "moe_config": "MoeConfig",
    "speculative_config": "DFlashDecodingConfig",
}


def import_tensorrt_llm(version: str) -> Any:
    """The package. Raises DFlashError if it is not installed or does not start."""
    try:
        return importlib.import_module("tensorrt_llm")
    except Exception as error:  # its native parts may raise anything
        raise DFlashError(
            f"tensorrt_llm cannot be imported ({type(error).__name__}: {error}); this bundle is for {version}: run it "
            f"in nvcr.io/nvidia/tensorrt-llm/release:{version}, or pip install tensorrt_llm=={version}"
        ) from error


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
    for section, name in _SECTIONS.items():
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
    the drafter's attention lacks a package. Warns if another backend replaces it, and if the package is another release
    than the bundle's, but accepts the configuration.
    """
    version = bundle.manifest["tensorrt_llm"]["version"]
    module = import_tensorrt_llm(version)
    args = read_llm_args(bundle)
    drafting = args["speculative_config"]
    if (asked := drafting.get("attention_backend")) and hasattr(module.llmapi, "DFlashDecodingConfig"):
        try:
            drafting["attention_backend"], lacks = choose(asked, module.llmapi.DFlashDecodingConfig)
        except ValueError as error:
            raise DFlashError(f"{bundle.path}: {error}") from None
        if lacks:
            backend = drafting["attention_backend"]
            warn_once(
                _log, f"{bundle.path}: the drafter runs with {backend} instead of {asked}: {'; '.join(lacks)}"
            )
    drafting["speculative_model"] = str((bundle.path / "drafter").resolve())
    try:
        args = _constructed(module.llmapi, args)
    except ValueError as error:
        raise DFlashError(
            f"{bundle.path / 'llm_args.yaml'}: made for TensorRT-LLM {version}, but {module.__version__} is "
            f"installed: {error}. Install {version}, or build the bundle again with --trtllm-version"
        ) from None
    if module.__version__ != version:
        warn_once(
            _log,
            f"{bundle.path}: made for TensorRT-LLM {version}, {module.__version__} is installed; it knows every field",
        )
    model = str((bundle.path / "target").resolve())
    return module, module.LLM(model=model, skip_tokenizer_init=True, **args)
