"""Known pairs, read from their configurations."""

from __future__ import annotations

import pytest

from dflash_trt.checkpoint.catalogue import known_configs
from tests.trtllm.test_configuration import PAIRS, Pair, read_pair


@pytest.fixture(scope="package")
def pairs() -> dict[str, Pair]:
    return {name: read_pair(*known_configs(name)) for name in PAIRS}
