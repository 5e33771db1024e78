"""A pair on ONNX Runtime and on another engine in float32, whose tokens must be equal; and what is asked of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_trt import SamplingParams
from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.formats.precision import Precision

FLOAT32 = Precision(target="fp32", drafter="fp32")


def for_both(
    directory: Path,
    target: str | Path,
    drafter: str | Path,
    engine: str,
    options: Any = None,
    **settings: Any,
) -> tuple[Bundle, Bundle]:
    """Built for ONNX Runtime, and for `engine` with these options of its own."""
    sources = str(target), str(drafter)
    plain = build(*sources, directory / "onnxruntime", engine="onnxruntime", **settings)
    asked = {"precision": FLOAT32, "engine": engine, "options": options} | settings
    return plain, build(*sources, directory / engine, **asked)


def prompts() -> list[list[int]]:
    """Five, of several lengths."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 300, n).tolist() for n in (3, 40, 17, 1, 25)]


def params(temperature: float) -> list[SamplingParams]:
    """For these prompts: budgets of several lengths, so that requests end in other rounds."""
    lengths = (30, 8, 50, 21, 12)
    return [SamplingParams(temperature=temperature, max_tokens=n, seed=n, ignore_eos=True) for n in lengths]
