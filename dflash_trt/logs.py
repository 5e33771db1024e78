"""Logging under the name `dflash_trt`. A program configures it as that of any other library.

Without a configuration, Python prints warnings to standard error and nothing else.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import TextIO

LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}


@cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log a warning. The same text is logged once per process."""
    logger.warning(message)


def to_stderr(level: str) -> None:
    """Print what `dflash_trt` logs at `level` and above, for the command line. A later call replaces an earlier one."""
    root = logging.getLogger("dflash_trt")
    for handler in [old for old in root.handlers if old.get_name() == "dflash-trt"]:
        root.removeHandler(handler)
    handler = _Stderr()
    handler.set_name("dflash-trt")
    handler.setFormatter(_Lines())
    root.addHandler(handler)
    root.setLevel(LEVELS[level])


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to what sys.stderr is when it writes, as the program may have replaced and closed the earlier one."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Lines(logging.Formatter):
    """`dflash-trt: warning: TEXT`; what is below a warning also names its module and the time."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if record.levelno >= logging.WARNING:
            return f"dflash-trt: {record.levelname.lower()}: {text}"
        module = record.name.removeprefix("dflash_trt.")
        return f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} {module}: {text}"
