"""Work directories for bundles, checkpoints and repositories: beside the final place, and renamed when complete.

`.NAME.dflash-trt-work` has a lock, computed digests, and four directories, which alone are ever removed: `new` becomes
NAME, `scratch` is for the work, `replaced` is the old bundle until the new one is in its place, and `removed` is what a
removal has begun with: a run takes up what an interrupted one left in `new` and `scratch`, so both lose their names
before their files. See docs/bundle.md.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_trt.bundle.manifest import Bundle, read_manifest, unlisted
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.files.disk import held_folder, name_instead, sync, sync_tree, writing

# Called as progress(step, done, total). The unit depends on the step: files or bytes.
Progress = Callable[[str, int, int], None]

_NEW, _SCRATCH, _REPLACED, _REMOVED = "new", "scratch", "replaced", "removed"


def silent(step: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@dataclass
class Workspace:
    """A work directory, held by one process. `path` becomes `out`; `scratch` is removed when the work is done."""

    out: Path
    area: Path
    done: bool = False
    _replaces: bool = False

    @property
    def path(self) -> Path:
        """The directory that becomes `out`."""
        return self.area / _NEW

    @property
    def scratch(self) -> Path:
        """The directory for what is not part of the result."""
        return self.area / _SCRATCH

    @property
    def digests(self) -> Path:
        """The file that records computed digests."""
        return self.area / "digests.json"

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
        self._check_listed(self.out)
        self._replaces = True
        return None

    def _check_listed(self, bundle: Path) -> None:
        if others := unlisted(bundle, read_manifest(bundle)):
            raise BuildError(
                f"{self.out}: holds {len(others)} files that are not part of the bundle, such as {others[0]!r}; they "
                "would be lost with it: move them, or choose another --out"
            )

    def check_free(self, state: str) -> None:
        """Raise BuildError, with `state` as its text, if `out` exists."""
        if os.path.lexists(self.out) and any(self.out.iterdir()):
            raise BuildError(f"{self.out}: {state}; choose another --out, or remove it")

    def publish(self) -> None:
        """Move the content of `path` to `out`, complete and on disk.

        Raises BuildError if `out` has appeared meanwhile, or has got files of others. The work is kept.
        """
        sync_tree(self.path)
        if self._replaces:
            self.out.rename(self.area / _REPLACED)
            self._check_listed(self.area / _REPLACED)
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
        self._sync_names()

    def put_back(self) -> None:
        """Undo a replacement that was interrupted: `replaced` is out of its place, and `path` is not yet in it."""
        old = self.area / _REPLACED
        if old.exists() and self.path.exists():
            if os.path.lexists(self.out):
                raise BuildError(
                    f"{self.out}: has appeared while the bundle that was there was being replaced; move it away, and "
                    f"that bundle, now {old}, is put back"
                )
            old.rename(self.out)
            self._sync_names()

    def _sync_names(self) -> None:
        sync(self.area)
        sync(self.area.parent)

    def empty(self) -> None:
        """Start again, without the results of an interrupted run."""
        for folder in (self.path, self.scratch):
            shutil.rmtree(folder)
            folder.mkdir()

    @property
    def over(self) -> bool:
        """Whether the work directory can go: the work is done, or there is nothing to resume from."""
        folders = [folder for folder in (self.path, self.scratch) if folder.exists()]
        return self.done or not any(any(folder.iterdir()) for folder in folders)

    def clear(self) -> None:
        """Remove what is in the work directory. An interrupted removal can be continued."""
        removed = self.area / _REMOVED
        for name in (_REMOVED, _NEW, _SCRATCH, _REPLACED):
            with suppress(FileNotFoundError):
                (self.area / name).rename(removed)
                shutil.rmtree(removed)
        for name in (self.digests.name, f"{self.digests.name}.part"):
            (self.area / name).unlink(missing_ok=True)


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
def workspace(out: Path) -> Iterator[Workspace]:
    """The work directory beside `out`, for one process at a time. An interrupted run leaves it, and the next run
    resumes it. If it was interrupted while it replaced an old bundle, the old bundle is put back first.

    Raises BuildError if the place cannot be written, or another process holds it.
    """
    out = Path(os.path.abspath(out))
    place = Workspace(out, out.with_name(f".{out.name}.dflash-trt-work"))
    with ExitStack() as held:
        with writing(out, "choose another --out"):
            check_place(out)
            out.parent.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(held_folder(place.area)):
                raise BuildError(
                    f"{out}: another process is writing it; wait for it, or choose another --out"
                )
            place.put_back()
            if not place.path.exists():
                place.clear()
        try:
            for folder in (place.path, place.scratch):
                folder.mkdir(exist_ok=True)
            yield place
        except BaseException as error:
            place.put_back()
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            if full or isinstance(error, MemoryError):
                place.done = True  # there is no room for the work
            if place.over:
                name_instead(error, place.area, out)
            raise
        finally:
            if place.over:
                place.clear()
