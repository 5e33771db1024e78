"""Choose the drafter's attention backend by what is installed, before a model is loaded.

TensorRT-LLM imports a backend's packages when the drafter is made, after minutes of loading. The start scripts of a
bundle run a copy of this file, which therefore imports nothing of this project.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any

# Modules by backend, and the packages that have them: NVIDIA/TensorRT-LLM, pull requests 16914 and 18553.
_NEEDS = {"VANILLA": ("flash_attn",), "FA4": ("flash_attn.cute", "flashinfer"), "TRTLLM": ("flashinfer",)}
_PACKAGES = {"flash_attn": "flash-attn", "flashinfer": "flashinfer-python"}
# FA4 and VANILLA keep the drafter's context in the same dense buffer. So one can replace the other, and the computed
# memory still holds. TRTLLM keeps it in pages.
_FALLBACKS = {"FA4": "VANILLA"}


def choose(backend: str, config_class: Any) -> tuple[str, list[str]]:
    """This backend, or the one that replaces it here; and in that case what the first one lacks.

    config_class: the installed DFlashDecodingConfig, which says which backends there are.

    Raises ValueError if no backend can run.
    """
    lacks = _problems(backend, config_class)
    fallback = _FALLBACKS.get(backend)
    if not lacks:
        return backend, []
    if fallback is not None and not _problems(fallback, config_class):
        return fallback, lacks
    packages = sorted({_PACKAGES[name.partition(".")[0]] for name in _NEEDS.get(backend, ())})
    raise ValueError(
        f"the drafter's attention_backend is {backend}, but {'; '.join(lacks)}; pip install {' '.join(packages)}, or "
        "build the bundle again with another --drafter-attention"
    )


def _problems(backend: str, config_class: Any) -> list[str]:
    """What keeps a backend from running here: the installed class does not take it, or modules are missing."""
    field = config_class.model_fields.get("attention_backend")
    offered = literals(field.annotation) if field is not None else set()
    if offered and backend not in offered:
        return [f"the installed TensorRT-LLM takes {', '.join(sorted(offered))}"]
    missing = []
    for name in _NEEDS.get(backend, ()):
        try:
            importlib.import_module(name)
        except Exception as error:  # native parts may raise anything
            missing.append(f"{name} cannot be imported ({error})")
    return missing


def literals(annotation: Any) -> set[Any]:
    """The values of a Literal, alone or in a union of literals and None. Empty for any other annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    parts = [literals(part) for part in typing.get_args(annotation) if part is not type(None)]
    return set().union(*parts) if parts and all(parts) else set()


def usable(file: Path) -> Path:
    """The configuration to start with: `file`, or a copy with the backend that replaces the one in it.

    `file` also where this Python has no TensorRT-LLM: then trtllm-serve belongs to another one.

    Raises ValueError if no backend can run.
    """
    if importlib.util.find_spec("tensorrt_llm") is None:
        return file
    import yaml

    config_class = importlib.import_module("tensorrt_llm.llmapi").DFlashDecodingConfig
    document = yaml.safe_load(file.read_text())
    drafting = document.get("speculative_config")
    if drafting is None:
        return file
    asked = drafting["attention_backend"]
    drafting["attention_backend"], lacks = choose(asked, config_class)
    if not lacks:
        return file
    backend = drafting["attention_backend"]
    print(f"the drafter runs with {backend} instead of {asked}: {'; '.join(lacks)}", file=sys.stderr)
    copy = Path(tempfile.mkdtemp(prefix="dflash-trt-")) / file.name
    copy.write_text(yaml.safe_dump(document, sort_keys=False))
    return copy


if __name__ == "__main__":
    try:
        print(usable(Path(sys.argv[1])))
    except ValueError as error:
        sys.exit(f"{sys.argv[1]}: {error}")
