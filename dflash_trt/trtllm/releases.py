"""The supported releases of TensorRT-LLM, and their configuration fields.

A release is a file in schemas/. It has the JSON Schema of TorchLlmArgs, for the fields that are written or checked
here, from the release's published reference. It also has the other differences between releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflash_trt.errors import BuildError, UsageError
from dflash_trt.extras import install

_SCHEMAS = Path(__file__).with_name("schemas")
_FIRST = "1.3.0rc12"  # DFlash was merged in April 2026 (NVIDIA/TensorRT-LLM#12794), after rc11


@dataclass(frozen=True)
class Release:
    """One release. `llm_args` and `disaggregated` are JSON Schemas; `sources` names the source of each class.

    hopper_mxfp4_moe_backend: the backend of gpt-oss experts on SM90.
    draft_pool_beside_arena: whether pages are reserved for a drafter that keeps its context in its own arena (fixed by
        NVIDIA/TensorRT-LLM#19410).
    dflash2: whether it is known to have DFlash2.
    """

    version: str
    container: str
    sources: Mapping[str, str]
    hopper_mxfp4_moe_backend: str
    draft_pool_beside_arena: bool
    dflash2: bool
    llm_args: Mapping[str, Any]
    disaggregated: Mapping[str, Any]

    def fields(self, name: str) -> frozenset[str]:
        """The fields of a configuration class, TorchLlmArgs or one of those inside it."""
        schema = self.llm_args if name == "TorchLlmArgs" else self.llm_args["$defs"][name]
        return frozenset(schema["properties"])

    def check(self, document: Mapping[str, Any], kind: str = "llm_args") -> None:
        """Check a configuration against this release's fields.

        Raises BuildError naming the first field that the release does not know or would refuse.
        """
        try:
            from jsonschema import Draft202012Validator
        except ImportError:
            raise BuildError(
                f"jsonschema is not installed; install it with: {install('tensorrt-llm')}"
            ) from None

        # YAML allows integer keys, JSON does not.
        plain = json.loads(json.dumps(document))
        schema = self.llm_args if kind == "llm_args" else self.disaggregated
        for error in Draft202012Validator(schema).iter_errors(plain):
            while error.context:
                error = error.context[0]
            place = ".".join(map(str, error.absolute_path)) or kind
            raise BuildError(f"TensorRT-LLM {self.version}: {place}: {error.message}")


def known_releases() -> list[str]:
    """The versions of the known releases, oldest first."""
    return sorted((path.stem for path in _SCHEMAS.glob("*.json")), key=_order)


@cache
def find_release(version: str | None = None) -> Release:
    """A known release, by default the newest.

    Raises BuildError if its fields are not known here.
    """
    known = known_releases()
    version = version or known[-1]
    if version not in known:
        raise UsageError(
            f"--trtllm-version is {version}, whose configuration fields are not known here, and TensorRT-LLM refuses "
            f"fields it does not know (DFlash came with {_FIRST}); choose one of: {', '.join(known)}"
        )
    values = json.loads((_SCHEMAS / f"{version}.json").read_text())
    return Release(**values)


def _order(version: str) -> list[int]:
    """1.4.0rc1 comes before 1.4.0rc10, and both before 1.4.0."""
    numbers = [int(number) for number in re.findall(r"\d+", version)]
    return numbers if "rc" in version else [*numbers, 10_000]
