"""The extra that training needs."""

from __future__ import annotations

from importlib.util import find_spec

from dflash_trt.errors import DFlashError
from dflash_trt.extras import install


def check_installed() -> None:
    """Raise DFlashError, with the command that installs it, if a package of the extra `train` is missing."""
    for name in ("accelerate", "safetensors", "torch", "transformers"):
        if find_spec(name) is None:
            raise DFlashError(f"{name} is not installed; training needs: {install('train')}")
