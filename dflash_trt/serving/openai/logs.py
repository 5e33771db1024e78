"""The server's log: a line per request and event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _TextLines(logging.Formatter):
    """The same as text."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_word(value)}" for name, value in getattr(record, "fields", {}).items())
        text = f"{self.formatTime(record)} {record.levelname.lower()} {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _word(value: Any) -> str:
    """A field's value as one word. Quotes keep a client's spaces and line breaks within it."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if re.fullmatch(r"[!#-~]*", text) else json.dumps(text)


def set_up_logs(as_json: bool) -> None:
    """Log to standard error: the server's lines, and uvicorn's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _TextLines())
    for name in ("dflash_trt", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "dflash_trt" else logging.WARNING)
