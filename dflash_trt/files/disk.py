"""Files and directories on disk: written completely or not at all, without following links, safe against power cuts.

Everything that differs between operating systems is in this module: locks, flushing, copies that share blocks.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any

from dflash_trt.errors import BuildError, CheckpointError, DFlashError

LOCK = "lock"  # the name of the file in a held folder
_COPIED = 1 << 30  # bytes of a call


def cache_folder() -> Path:
    """The folder for what is made once and used again: DFLASH_TRT_CACHE, by default ~/.cache/dflash-trt."""
    return Path(os.environ.get("DFLASH_TRT_CACHE") or "~/.cache/dflash-trt").expanduser()


@contextmanager
def writing(place: Path, advice: str) -> Iterator[None]:
    """Raise BuildError, with what to do, where the block cannot write to `place`. A full disk stays an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildError(f"{place}: cannot be written ({error.strerror or error}); {advice}") from error


@contextmanager
def continued(place: Path) -> Iterator[None]:
    """Raise BuildError where the disk is full in a block whose work in `place` the same command continues."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildError(
            f"{error.filename or place}: the disk is full; free some space, and the same command continues with what "
            f"is in {place}"
        ) from error


def cached_in(place: Path) -> AbstractContextManager[None]:
    """`writing`, for a place in the cache."""
    return writing(place, "set DFLASH_TRT_CACHE to a directory that can be written")


def own_file(directory: Path, file: Path) -> Path:
    """The real path of `file`, a file of the checkpoint or bundle in `directory`.

    A symbolic link must lead to a file inside `directory` or inside the same repository of the Hugging Face cache.
    There, a snapshot is a directory of links to the repository's blobs.

    Raises CheckpointError if a link leads elsewhere.
    """
    root, real = directory.resolve(), file.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        blobs = (root.parent.parent / "blobs").resolve()
        if real.is_relative_to(blobs):
            return real
    if not real.is_relative_to(root):
        raise CheckpointError(
            f"{file}: is a symbolic link to {real}, outside {directory}; put the file itself there"
        )
    return real


def stamp(status: os.stat_result) -> tuple[int, int, int, int]:
    """Device, inode, size in bytes and modification time in nanoseconds. They change when a file is written or
    replaced.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def whole_file(path: Path) -> Iterator[BufferedWriter]:
    """Open a file for writing. `path` appears once the data is complete and on disk, or never if the block raises."""
    partial = path.with_name(path.name + ".part")
    with suppress(NotADirectoryError):  # opening it says so
        partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        name_instead(error, partial, path)
        with suppress(NotADirectoryError):
            partial.unlink(missing_ok=True)
        raise


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as JSON. `path` is replaced once the file is complete."""
    with whole_file(path) as file:
        file.write(json.dumps(values, indent=2).encode() + b"\n")


def name_instead(error: BaseException, gone: Path, known: Path, but: Path | None = None) -> None:
    """Let an error name `known` wherever it names a path in `gone`, a directory that is removed before it is read.

    but: a directory in `gone` that stays.
    """

    def stays(name: str) -> bool:
        return but is not None and Path(name).is_relative_to(but)

    if isinstance(error, OSError):
        for attribute in ("filename", "filename2"):
            name = getattr(error, attribute)
            if isinstance(name, str | Path) and Path(name).is_relative_to(gone) and not stays(str(name)):
                setattr(error, attribute, str(known))
    elif isinstance(error, DFlashError):
        inside = re.compile(re.escape(str(gone)) + r"[^\s:,;'\")]*")
        error.args = tuple(
            inside.sub(lambda found: found[0] if stays(found[0]) else str(known), str(text))
            for text in error.args
        )


@contextmanager
def temporary_folder(**place: Any) -> Iterator[Path]:
    """A directory that is removed at the end. Errors name the folder it is in instead.

    place: arguments of tempfile.mkdtemp.
    """
    with tempfile.TemporaryDirectory(**place) as name:
        folder = Path(name)
        try:
            yield folder
        except Exception as error:
            name_instead(error, folder, folder.parent)
            raise


def sync_tree(directory: Path) -> None:
    """Flush `directory` and every file and directory in it to the disk."""
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            if not (path := Path(folder, name)).is_symlink():
                sync(path)
        sync(Path(folder))


def sync(path: Path) -> None:
    """Flush a file, or the names in a directory.

    Windows opens no directories, and flushes only files that are open for writing, which a linked one may forbid.
    """
    posix = hasattr(os, "O_DIRECTORY")
    if not posix and path.is_dir():
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if posix else os.O_RDWR)
    except PermissionError:
        if posix:
            raise
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy(source: Path, destination: Path) -> None:
    """Copy a file and its modification time. `destination` appears once it is complete and on disk.

    The two share their blocks where the file system can.
    """
    with source.open("rb") as old, whole_file(destination) as new:
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), _COPIED):
                pass
        except (AttributeError, OSError) as error:  # other systems lack it, and some file systems refuse
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise
            old.seek(0)
            new.seek(0)
            shutil.copyfileobj(old, new, 8 << 20)
            new.flush()
        times = os.fstat(old.fileno())
        os.utime(new.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))


@contextmanager
def held_folder(folder: Path) -> Iterator[bool]:
    """Make `folder` if it is missing, and hold it for this process. Yields False if another process holds it.

    The lock is a file in the folder, which is removed when the lock is released. So is the folder if it is empty then.
    Raises BuildError if `folder` is a link, a file, or a directory of another user.
    """
    import filelock  # slow to import: it brings asyncio

    lock = filelock.FileLock(folder / LOCK, timeout=0)
    try:
        while not lock.is_locked:
            with suppress(FileExistsError):
                folder.mkdir(0o700)
            with suppress(FileNotFoundError):  # the previous holder has just removed the folder
                status = folder.lstat()
                ours = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
                if not stat.S_ISDIR(status.st_mode) or not ours:
                    raise BuildError(f"{folder}: is not a directory of this user; remove it")
                lock.acquire()
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        try:
            with suppress(OSError):  # Windows removes no file that is open; there the release does
                (folder / LOCK).unlink()
        finally:
            lock.release()
        with suppress(OSError):  # it is not empty, or the next holder has it already
            folder.rmdir()
