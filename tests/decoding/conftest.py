"""A bundle for the tests of requests, what runs commands, and a clock for the scheduler."""

import pytest

from dflash_trt.decoding import scheduler
from tests.doubles.bundles import bundle
from tests.doubles.commands import command
from tests.doubles.schedules import Clock

__all__ = ["bundle", "command"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler, "perf_counter", clock)
    return clock
