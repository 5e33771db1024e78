"""The version of the plugins' semantics. It is part of their names and of a bundle's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_trt.errors import BundleError

# Increment when a plugin's inputs, outputs or results change, and when the noise or weights of decoding/ change.
VERSION = 2
NAMESPACE = "dflash"


def versioned(name: str) -> str:
    """The name under which a plugin is registered."""
    return f"{name}_v{VERSION}"


def check(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a plan whose plugins follow other rules than this version's host code. `where` names the bundle.

    Raises BundleError.
    """
    version = manifest.get("tensorrt", {}).get("plugins", {}).get("version", VERSION)
    if version != VERSION:
        raise BundleError(
            f"{where}: manifest.json tensorrt.plugins.version is {version!r}, expected {VERSION}: the plans hold "
            "kernels of another version of dflash-trt; build the bundle again"
        )
