"""Work directories for bundles, checkpoints and repositories: beside the final place, and renamed when complete.

See docs/bundle.md.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from dflash_trt.bundle.manifest import MANIFEST, Bundle, read_manifest, unlisted
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.files.disk import LOCK, held_folder, name_instead, sync, sync_tree, write_object, writing
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)

# Called as progress(step, done, total). The unit depends on the step: files or bytes.
Progress = Callable[[str, int, int], None]
Kind = Literal["bundle", "checkpoint", "repository"]

# What a work directory has: beside the lock, its purpose, digests, and four directories. What is removed is renamed
# first, because the next run would take the remains for whole work.
_RECORD, _DIGESTS = "record.json", "digests.json"
_NEW, _SCRATCH, _REPLACED, _REMOVED = "new", "scratch", "replaced", "removed"


def silent(step: str, done: int, total: int) -> None:
    pass


@dataclass
class Workspace:
    """A work directory, held by one process. `path` becomes `out`; `scratch` is removed when the work is done."""

    out: Path
    area: Path
    done: bool = False
    _replaces: bool = False

    @property
    def path(self) -> Path:
        return self.area / _NEW

    @property
    def scratch(self) -> Path:
        return self.area / _SCRATCH

    @property
    def digests(self) -> Path:
        """The file that records computed digests."""
        return self.area / _DIGESTS

    def existing(self, key: str, *, force: bool) -> Bundle | None:
        """The bundle in `out`, if it is complete and has this key. Otherwise `publish` will replace it.

        Raises BuildError if something else is in `out`, or needs `force` to be replaced. A directory that is no
        bundle of this version, or that has files its manifest does not list, is never replaced.
        """
        if not os.path.lexists(self.out) or not any(self.out.iterdir()):
            return None
        check_out(self.out)
        manifest = read_manifest(self.out)
        try:
            if manifest["key"] == key:
                return Bundle.open(self.out)
            problem = f"{self.out}: holds a bundle of other inputs or options (key {manifest['key'][:12]})"
        except BundleError as error:
            problem = f"{self.out}: holds this bundle, damaged ({error})"
        if not force:
            raise BuildError(f"{problem}; choose another --out, or replace it with --force")
        if others := unlisted(self.out, manifest):
            raise BuildError(
                f"{self.out}: holds {len(others)} files that are not part of the bundle, such as {others[0]!r}; they "
                "would be lost with it: move them, or choose another --out"
            )
        self._replaces = True
        return None

    def check_free(self, state: str) -> None:
        """Raise BuildError, with `state` as its text, if `out` exists."""
        if os.path.lexists(self.out) and any(self.out.iterdir()):
            raise BuildError(f"{self.out}: {state}; choose another --out, or remove it")

    def publish(self) -> None:
        """Move the content of `path` to `out`, complete and on disk.

        Raises BuildError if `out` has appeared meanwhile. The work is kept.
        """
        sync_tree(self.path)
        if self._replaces:
            self.out.rename(self.area / _REPLACED)
        try:
            self.path.rename(self.out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise BuildError(
                f"{self.out}: has appeared during the work; move it away and run this again: the finished work is "
                "reused"
            ) from None
        self.done = True
        self.sync()

    def sync(self) -> None:
        """Flush the names in the work directory and beside it to the disk."""
        sync(self.area)
        sync(self.area.parent)

    def empty(self) -> None:
        """Start again, without the results of an interrupted run."""
        for folder in (self.path, self.scratch):
            shutil.rmtree(folder)
            folder.mkdir()


def check_out(out: Path) -> None:
    """Raise BuildError if `out` cannot become a bundle: a file, a link, or a directory with other content."""
    check_place(out)
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        read_manifest(out)
    except BundleError as error:
        raise BuildError(
            f"{out}: exists, is not empty and is not a bundle that this version can replace ({error}); "
            "choose another --out, or remove it yourself"
        ) from None


def check_place(out: Path) -> None:
    """Raise BuildError if `out` is a file or a symbolic link."""
    if out.is_symlink():
        raise BuildError(
            f"{out}: is a symbolic link to {os.readlink(out)}; give the directory itself as --out"
        )
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out}: is a file; choose another --out")


@contextmanager
def workspace(out: Path, kind: Kind) -> Iterator[Workspace]:
    """The work directory beside `out`, for one process at a time. An interrupted run leaves it, and the next run of
    this kind resumes it. If it was interrupted while it replaced an old bundle, the old bundle is put back first.

    Raises BuildError if the place cannot be written, another process holds it, or its work directory is not ours.
    """
    out = Path(os.path.abspath(out))
    area = out.with_name(f".{out.name}.work")
    with ExitStack() as held:
        with writing(out, "choose another --out"):
            check_place(out)
            out.parent.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(held_folder(area)):
                raise BuildError(
                    f"{out}: another process is writing it; wait for it, or choose another --out"
                )
            place = Workspace(out, area)
            _put_in_order(place, kind)
        try:
            for folder in (place.path, place.scratch):
                folder.mkdir(exist_ok=True)
            yield place
        except BaseException as error:
            # There is no room for the work. An old bundle that is being replaced stays for the next run.
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, MemoryError):
                place.done = not (area / _REPLACED).exists()
            if _is_over(place):
                name_instead(error, area, out)
            raise
        finally:
            if _is_over(place):
                _clear(place)


def _is_over(place: Workspace) -> bool:
    """Whether the work directory is removed: it is done, or holds nothing to resume from."""
    return place.done or not any(any(folder.iterdir()) for folder in (place.path, place.scratch))


def _put_in_order(place: Workspace, kind: Kind) -> None:
    """Undo or finish what an interrupted run had begun. Work of another kind is removed."""
    record, wanted = place.area / _RECORD, {"format": "dflash-trt work directory", "kind": kind}
    inside = set(os.listdir(place.area)) - {LOCK, f"{_RECORD}.part"}
    try:
        recorded = json.loads(record.read_text()) if inside else wanted
        ours = recorded["format"] == wanted["format"]
    except (OSError, ValueError, TypeError, KeyError):
        ours = False
    if not ours:
        raise BuildError(f"{place.area}: is in the way and was not made by dflash-trt; move it away")
    if {_REPLACED, _NEW} <= inside:
        if os.path.lexists(place.out):
            _keep_replaced(place)
        else:
            (place.area / _REPLACED).rename(place.out)
            place.sync()
    if inside and (recorded != wanted or _NEW not in inside):
        _clear(place)
    if not record.exists():
        write_object(record, wanted)


def _clear(place: Workspace) -> None:
    """Remove what is in the work directory. The record goes last, so that an interrupted removal can be continued."""
    for folder in (_REMOVED, _NEW, _SCRATCH):
        with suppress(FileNotFoundError):
            if folder != _REMOVED:
                (place.area / folder).rename(place.area / _REMOVED)
            shutil.rmtree(place.area / _REMOVED)
    if not remove_bundle(place.area / _REPLACED):
        _keep_replaced(place)
    for file in (_DIGESTS, f"{_DIGESTS}.part", _RECORD):
        (place.area / file).unlink(missing_ok=True)


def _keep_replaced(place: Workspace) -> None:
    kept = place.out.with_name(f"{place.out.name}.replaced-{secrets.token_hex(4)}")
    (place.area / _REPLACED).rename(kept)
    warn_once(_log, f"{kept}: keeps files that {place.out} had before, or got while it was replaced")


def remove_bundle(path: Path) -> bool:
    """Remove the files that a bundle's manifest lists, and then the manifest. Returns False if other files are left.

    Links are not followed.
    """
    if not os.path.lexists(path):
        return True
    with suppress(OSError):
        path.rmdir()
        return True
    try:
        names = [PurePosixPath(name) for name in read_manifest(path)["files"]]
    except BundleError:
        return False
    real = path.resolve()

    def reached(name: PurePosixPath) -> bool:
        """Whether no link is on the way."""
        return not path.is_symlink() and (path / name.parent).resolve() == real / name.parent

    for name in filter(reached, names):
        with suppress(OSError):
            (path / name).unlink()
    for folder in filter(
        reached, sorted({p for name in names for p in name.parents if p.name}, reverse=True)
    ):
        with suppress(OSError):
            (path / folder).rmdir()
    if os.listdir(path) != [MANIFEST]:
        return False
    (path / MANIFEST).unlink()
    path.rmdir()
    return True
