"""The packages that TensorRT-LLM's attention backends of a drafter import, checked before a model is loaded.

TensorRT-LLM imports them when the drafter is made, after minutes of loading.
"""

from __future__ import annotations

import importlib
import logging
from importlib import metadata
from pathlib import Path

from dflash_trt.errors import DFlashError
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)
# Modules by backend, and the packages that have them: NVIDIA/TensorRT-LLM, pull requests 16914 and 18553.
_NEEDS = {"VANILLA": ("flash_attn",), "FA4": ("flash_attn.cute", "flashinfer"), "TRTLLM": ("flashinfer",)}
_PACKAGES = {"flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}
# FA4 and VANILLA keep the drafter's context in the same dense buffer. So one can replace the other, and the computed
# memory still holds. TRTLLM keeps it in pages.
_FALLBACKS = {"FA4": "VANILLA"}


def problems(backend: str) -> list[str]:
    """The modules that a backend needs and that cannot be imported here, each with the installed version."""
    found = []
    for name in _NEEDS.get(backend, ()):
        try:
            importlib.import_module(name)
        except Exception as error:  # native parts may raise anything
            package = _PACKAGES[name.partition(".")[0]]
            found.append(f"{name} cannot be imported ({package}: {_version(package)}; {error})")
    return found


def usable_backend(backend: str, bundle: Path) -> str:
    """This backend, or the one that replaces it here, with a warning. Raises DFlashError if none can."""
    missing = problems(backend)
    if not missing:
        return backend
    fallback = _FALLBACKS.get(backend)
    if fallback is not None and not problems(fallback):
        warn_once(
            _log, f"{bundle}: the drafter runs with {fallback} instead of {backend}: {'; '.join(missing)}"
        )
        return fallback
    packages = sorted({_PACKAGES[name.partition(".")[0]] for name in _NEEDS[backend]})
    raise DFlashError(
        f"{bundle}: the drafter's attention_backend is {backend}, but {'; '.join(missing)}; pip install "
        f"{' '.join(packages)}, or build the bundle again with another --drafter-attention"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
