"""The packages of each engine: the pip command for them, and the image that serves its bundles with Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.engines.base import Engine
from dflash_trt.extras import install

# Tags of nvcr.io/nvidia/tritonserver. Containers before 26.07 have defects that clients can
# use (docs/serving.md, "Security"). Checked on 2026-11-25 against triton-inference-server/server at e1db8a6, of
# 2026-08-19: README.md names the first, and the second is the newest of its kind in docs/introduction/compatibility.md,
# which gives its TensorRT-LLM.
TRITON_IMAGE, TRITON_TRTLLM_IMAGE, TRITON_TRTLLM_VERSION = "26.07-py3", "26.07-trtllm-python-py3", "1.2.1"
# The release of TensorRT-LLM that bundles are made for.
TRTLLM_IMAGE, TRTLLM_VERSION = "nvcr.io/nvidia/tensorrt-llm/release", "1.4.0rc1"


@dataclass(frozen=True, kw_only=True)
class Packages:
    """extra: of this package. wheel: what runs a bundle only in the version that the manifest has in this `section`.
    tag: of NVIDIA's image of Triton. note: what a user should know before choosing it.
    """

    extra: str = ""
    wheel: str = ""
    section: str = ""
    tag: str = TRITON_IMAGE
    gpus: bool = True
    note: str = ""

    def pinned(self, manifest: Mapping[str, Any]) -> list[str]:
        """The requirements of a bundle beside those of this package."""
        return [f"{self.wheel}=={manifest[self.section]['version']}"] if self.wheel else []


PACKAGES: Mapping[str, Packages] = {
    "onnxruntime": Packages(gpus=False),
    "torch": Packages(extra="torch"),
    "tensorrt-rtx": Packages(extra="tensorrt-rtx", wheel="tensorrt-rtx-cu13", section="tensorrt"),
    "tensorrt": Packages(extra="tensorrt", wheel="tensorrt-cu13", section="tensorrt"),
    "tensorrt-llm": Packages(
        wheel="tensorrt_llm",
        section="tensorrt_llm",
        tag=TRITON_TRTLLM_IMAGE,
        note=f"# This image has TensorRT-LLM {TRITON_TRTLLM_VERSION}, which lacks DFlash, so the command installs the "
        "bundle's. Without Triton: launch/serve.sh of the bundle",
    ),
}


def packages_of(engine: Engine) -> Packages:
    """The packages of an engine; by default those that it needs, from this package's core."""
    return PACKAGES.get(engine.name, Packages())


def installation(engine: Engine, manifest: Mapping[str, Any] | None = None) -> str:
    """The command that installs what opening a bundle needs: the one with this manifest, or any."""
    packages = packages_of(engine)
    if engine.own_loop:
        version = TRTLLM_VERSION if manifest is None else manifest[packages.section]["version"]
        return f"pip install {packages.wheel}=={version}, or run it in {TRTLLM_IMAGE}:{version}"
    if not packages.extra:
        return install(*(f":{name}" for name in engine.needed))
    if manifest is None or not packages.wheel:
        return install(packages.extra)
    others = install(f"{packages.extra}:torch", f"{packages.extra}:triton")
    return others.replace("install", f"install {' '.join(packages.pinned(manifest))}", 1)
