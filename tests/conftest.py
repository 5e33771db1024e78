"""Settings of all tests. Kernels run in Triton's interpreter, unless set otherwise before, and torch has one thread.

Both must precede the imports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # torch's other threads would spin while another worker has their core
if os.environ.setdefault("TRITON_INTERPRET", "1") == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU here would change what `auto` chooses

from dflash_trt.logs import warn_once


@pytest.fixture(autouse=True)
def no_warning_yet() -> None:
    """Warnings are logged once per process, and here once per test."""
    warn_once.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def no_amx() -> Iterator[None]:
    """What a build chooses must not depend on the machine that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_trt.hardware.has_amx_int8", lambda: False)
        yield
