"""Work directories for bundles, checkpoints and repositories: beside the final place, and renamed when complete.

See docs/bundle.md.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from dflash_trt.bundle.manifest import MANIFEST, Bundle, read_manifest, unlisted
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.files.disk import locked, name_instead, sync_tree, writing
from dflash_trt.files.folder import Folder
from dflash_trt.logs import warn_once

_log = logging.getLogger(__name__)

# Called as progress(step, done, total). The unit depends on the step: files or bytes.
Progress = Callable[[str, int, int], None]
Kind = Literal["bundle", "checkpoint", "repository"]

_RECORD = "record.json"
_FORMAT = "dflash-trt work directory"
_DIGESTS = "digests.json"
_NEW, _SCRATCH, _REPLACED, _REMOVED = "new", "scratch", "replaced", "removed"


def silent(step: str, done: int, total: int) -> None:
    pass


@dataclass
class Workspace:
    """A work directory, held by one process. `path` becomes `out`; `scratch` is removed when the work is done."""

    out: Path
    kind: Kind
    area: Path
    parent: Folder  # the directory with `area` and `out`
    folder: Folder  # `area`
    done: bool = field(default=False)
    _replaces: bool = field(default=False)

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
            self.parent.rename(self.out.name, self.folder, _REPLACED)
        try:
            self.folder.rename(_NEW, self.parent, self.out.name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise BuildError(
                f"{self.out}: has appeared during the work; move it away and run this again: the finished work is "
                "reused"
            ) from None
        self.folder.sync()
        self.parent.sync()
        self.done = True

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
    """A work directory beside `out`, for one process at a time. An interrupted run leaves it, and the next run
    resumes it.

    Its name is random. A directory is resumed if it belongs to this user and records the same purpose. If a run was
    interrupted while it replaced an old bundle, the old bundle is put back first.
    """
    out = Path(os.path.abspath(out))
    with ExitStack() as held:
        with writing(out, "choose another --out"):
            check_place(out)
            out.parent.mkdir(parents=True, exist_ok=True)
            parent = held.enter_context(Folder(out.parent.resolve()))
            held.enter_context(_lock(out, parent))
            name = _resume(out, kind, parent) or _begin(out, kind, parent)
        with parent.inner(name) as area:
            place = Workspace(out, kind, out.parent / name, parent, area)
            try:
                for folder in (place.path, place.scratch):
                    folder.mkdir(exist_ok=True)
                yield place
            except BaseException as error:
                # There is no room for the work. An old bundle that is being replaced stays for the next run.
                full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
                if full or isinstance(error, MemoryError):
                    place.done = _REPLACED not in area.names()
                if _is_over(place):
                    name_instead(error, place.area, out)
                raise
            finally:
                if _is_over(place):
                    _remove(out, name, parent)


def _is_over(place: Workspace) -> bool:
    """Whether the work directory is removed: it is done, or holds nothing to resume from."""
    return place.done or not any(any(folder.iterdir()) for folder in (place.path, place.scratch))


@contextmanager
def _lock(out: Path, parent: Folder) -> Iterator[None]:
    with locked(out.with_name(f".{out.name}.lock"), parent) as held:
        if not held:
            raise BuildError(f"{out}: another process is writing it; wait for it, or choose another --out")
        yield


def _begin(out: Path, kind: Kind, parent: Folder) -> str:
    name = f".{out.name}.work-{secrets.token_hex(6)}"
    parent.make(name)
    with parent.inner(name) as area:
        with os.fdopen(area.file(_RECORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "w") as file:
            json.dump({"format": _FORMAT, "kind": kind, "out": out.name}, file)
            file.flush()
            os.fsync(file.fileno())
        area.sync()
    return name


def _resume(out: Path, kind: Kind, parent: Folder) -> str | None:
    """The work directory of an interrupted run, put in order. This user's other work directories are removed."""
    found = None
    pattern = re.compile(re.escape(f".{out.name}.work-") + "[0-9a-f]{12}")
    for name in sorted(filter(pattern.fullmatch, parent.names())):
        recorded = _recorded(name, parent)
        if recorded is None:
            continue
        if recorded and not _settle(out, name, parent):
            continue
        if found is None and recorded == {"format": _FORMAT, "kind": kind, "out": out.name}:
            found = name
        else:
            _remove(out, name, parent)
    return found


def _recorded(name: str, parent: Folder) -> dict[str, Any] | None:
    """The purpose of a work directory: {} if the run was killed at its start, None if the directory is not ours."""
    try:
        with parent.inner(name) as area:
            if not area.is_ours():
                return None
            with os.fdopen(area.file(_RECORD, os.O_RDONLY)) as file:
                recorded = json.loads(file.read(4096) or "{}")
            ours = isinstance(recorded, dict) and recorded.get("format") == _FORMAT
            return recorded if ours else {} if set(area.names()) == {_RECORD} else None
    except FileNotFoundError:
        with parent.inner(name) as area:
            return None if area.names() else {}
    except (OSError, ValueError):
        return None


def _settle(out: Path, name: str, parent: Folder) -> bool:
    """Put back an old bundle if its replacement was interrupted, or finish removing it. Returns False if it must
    stay.
    """
    with parent.inner(name) as area:
        inside = area.names()
        if _REPLACED not in inside:
            return True
        if _NEW not in inside:
            return remove_bundle(out.parent / name / _REPLACED)
        if not os.path.lexists(out):
            area.rename(_REPLACED, parent, out.name)
            area.sync()
            parent.sync()
            return True
        return False  # another one is in its place


def _remove(out: Path, name: str, parent: Folder) -> None:
    """Remove a work directory. A replaced bundle inside it loses only the files that its manifest lists.

    The record is removed last, so that an interrupted removal can be continued. Folders are renamed first. Otherwise
    the next run would take their remains for whole work.
    """
    with parent.inner(name) as area:
        for folder in (_REMOVED, _NEW, _SCRATCH):
            with suppress(FileNotFoundError):
                if folder != _REMOVED:
                    area.rename(folder, area, _REMOVED)
                area.remove_tree(_REMOVED)
        replaced = out.parent / name / _REPLACED
        if not remove_bundle(replaced):
            warn_once(_log, f"{replaced}: keeps files that the replaced bundle's manifest did not list")
            return
        for file in (_DIGESTS, f"{_DIGESTS}.part", _RECORD):
            with suppress(FileNotFoundError):
                area.unlink(file)
    parent.remove(name)


def remove_bundle(path: Path) -> bool:
    """Remove the files that a bundle's manifest lists, and then the manifest. Returns False if other files are left.

    Links are not followed.
    """
    if not os.path.lexists(path):
        return True
    with Folder(path) as root:
        try:
            if root.names() and not _emptied(root):
                return False
        except (BundleError, OSError):
            return False
    os.rmdir(path)
    return True


def _emptied(root: Folder) -> bool:
    """Remove the listed files, and the manifest last. Returns False if others are left."""
    manifest = read_manifest(root.path)
    names = [PurePosixPath(name) for name in manifest["files"]]
    for name in names:
        with suppress(OSError), _below(root, name.parent) as folder:
            folder.unlink(name.name)
    for directory in sorted({p for name in names for p in name.parents if p.name}, reverse=True):
        with suppress(OSError), _below(root, directory.parent) as folder:
            folder.remove(directory.name)
    if root.names() != [MANIFEST]:
        return False
    root.unlink(MANIFEST)
    return True


@contextmanager
def _below(root: Folder, path: PurePosixPath) -> Iterator[Folder]:
    """The folder of that path below `root`. Links on the way are refused."""
    with ExitStack() as stack:
        folder = root
        for part in path.parts:
            folder = stack.enter_context(folder.inner(part))
        yield folder
