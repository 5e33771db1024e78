"""Hides what Linux has and other systems lack. Imported before the package.

macOS lacks sched_getaffinity and /proc; Windows also lacks fcntl, resource, users' numbers and open directories.
"""

from __future__ import annotations

import builtins
import os
import pathlib
from typing import Any

import filelock

for missing in ("sched_getaffinity", "geteuid", "O_DIRECTORY", "O_NOFOLLOW"):
    if hasattr(os, missing):
        delattr(os, missing)
if hasattr(os, "process_cpu_count"):  # from Python 3.13 on; there it is the same function
    os.process_cpu_count = os.cpu_count

_import = builtins.__import__


def _without_unix(name: str, globals: Any = None, *arguments: Any, **options: Any) -> Any:
    """Only the project lacks them. Other libraries have means of their own elsewhere, such as msvcrt for locks."""
    if name in ("fcntl", "resource") and str((globals or {}).get("__name__", "")).startswith("dflash_"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, *arguments, **options)


builtins.__import__ = _without_unix

_read_text = pathlib.Path.read_text


def _without_proc(self: pathlib.Path, *arguments: Any, **options: Any) -> str:
    if str(self).startswith("/proc/"):
        raise FileNotFoundError(str(self))
    return _read_text(self, *arguments, **options)


pathlib.Path.read_text = _without_proc

_exists = pathlib.Path.exists


def _exists_without_proc(self: pathlib.Path, **options: Any) -> bool:
    return not str(self).startswith("/proc/") and _exists(self, **options)


pathlib.Path.exists = _exists_without_proc

_release = filelock.UnixFileLock._release


def _release_as_on_windows(self: filelock.UnixFileLock) -> None:
    """There the library removes the file of a lock that is released."""
    _release(self)
    pathlib.Path(self.lock_file).unlink(missing_ok=True)


filelock.UnixFileLock._release = _release_as_on_windows
