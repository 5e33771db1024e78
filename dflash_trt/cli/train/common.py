"""What the steps of training share: the extra that they need, and the prompts that a drafter is measured with."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from dflash_trt.cli.options import add_limit, at_least, option
from dflash_trt.errors import DFlashError
from dflash_trt.extras import install


def check_installed() -> None:
    """Raise DFlashError, with the command that installs it, if a package of the extra `train` is missing."""
    for name in ("accelerate", "safetensors", "torch", "transformers"):
        if find_spec(name) is None:
            raise DFlashError(f"{name} is not installed; training needs: {install('train')}")


def add_questions(parser: argparse.ArgumentParser, default: str) -> None:
    """`default`: the prompts without --held-out."""
    option(parser, "--held-out", "FILE", Path, f"prompts to measure with (default: {default})")
    add_limit(parser, 32)
    option(parser, "--eval-tokens", "N", at_least(2), "limit of tokens per answer", 96)
