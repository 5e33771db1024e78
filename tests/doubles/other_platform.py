"""Hides what Linux has and other systems lack: python -m pytest -p tests.doubles.other_platform tests/cli

macOS lacks sched_getaffinity and /proc; Windows also lacks fcntl and resource. Imported before the package.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

if hasattr(os, "sched_getaffinity"):
    del os.sched_getaffinity
sys.modules["fcntl"] = sys.modules["resource"] = None  # type: ignore[assignment]

_read_text = pathlib.Path.read_text


def _without_proc(self: pathlib.Path, *arguments: Any, **options: Any) -> str:
    if str(self).startswith("/proc/"):
        raise FileNotFoundError(str(self))
    return _read_text(self, *arguments, **options)


pathlib.Path.read_text = _without_proc  # type: ignore[method-assign]
