"""Checkpoints made of other files, which a cache keeps: DFLASH_TRT_CACHE, by default ~/.cache/dflash-trt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dflash_trt.bundle.manifest import digest
from dflash_trt.files.disk import cached_in, temporary_folder, write_object

RECORD = "converted.json"


def converted(place: Path, sha256: str, convert: Callable[[Path], Mapping[str, Any]]) -> Path:
    """`place` in the cache, made on first use by `convert`, which fills a directory and returns what to record.

    sha256: of what is converted. The conversion is reused if all its files have their recorded digests.
    """
    if _whole(place, sha256):
        return place
    with ExitStack() as stack:
        with cached_in(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(temporary_folder(prefix=f".{place.name}.", dir=place.parent))
        record = convert(work)
        digests = {path.name: digest(path) for path in sorted(work.iterdir())}
        write_object(work / RECORD, {**record, "sha256": sha256, "files": digests})
        if not _whole(place, sha256):  # another process may have been faster
            shutil.rmtree(place, ignore_errors=True)
            work.rename(place)
    return place


def _whole(place: Path, sha256: str) -> bool:
    """Whether `place` holds the complete, unaltered conversion of what has this digest."""
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
        return bool(record["sha256"] == sha256) and all(
            digest(place / name) == expected for name, expected in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
