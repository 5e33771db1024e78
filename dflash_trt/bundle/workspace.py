"""Work directories for bundles, checkpoints and repositories: beside the final place, and renamed when complete.

`.NAME.dflash-trt-work` has a lock and three directories, which alone are ever removed: `new` becomes NAME, `scratch` is
for the work, and `replaced` is the old bundle until the new one is in its place. What an interrupted run left is
removed, but for the plans in `new`, which the next run takes up. See docs/bundle.md.

Input files come into a work directory by `read_inputs`, which computes their digests, and `bring`, which copies or
links them.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.bundle.manifest import MANIFEST, Bundle, digest, read_manifest, unlisted
from dflash_trt.errors import BuildError, BundleError
from dflash_trt.files.disk import copy, held_folder, name_instead, stamp, sync, sync_tree, writing

# Called as progress(step, done, total). The unit depends on the step: files or bytes.
Progress = Callable[[str, int, int], None]

# Advice of errors here. A bundle in the cache has no options: `first_use` says what to do instead.
ANOTHER, LINKED = "choose another --out", ", or use the checkpoint's own files with --weights link"
PLANS = "plans"  # the folder of `new` that outlives an interrupted run
_NEW, _SCRATCH, _REPLACED = "new", "scratch", "replaced"


def silent(step: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


@dataclass
class Workspace:
    """A work directory, held by one process. `path` becomes `out`; `scratch` is removed when the work is done."""

    out: Path
    area: Path
    _replaces: bool = False

    @property
    def path(self) -> Path:
        """The directory that becomes `out`."""
        return self.area / _NEW

    @property
    def scratch(self) -> Path:
        """The directory for what is not part of the result."""
        return self.area / _SCRATCH

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
            raise BuildError(f"{problem}; {ANOTHER}, or replace it with --force")
        self._check_listed()
        self._replaces = True
        return None

    def _check_listed(self) -> None:
        if others := unlisted(self.out, read_manifest(self.out)):
            raise BuildError(
                f"{self.out}: holds {len(others)} files that are not part of the bundle, such as {others[0]!r}; they "
                f"would be lost with it: move them, or {ANOTHER}"
            )

    def check_free(self) -> None:
        """Raise BuildError if there is anything in `out`."""
        if os.path.lexists(self.out) and any(self.out.iterdir()):
            raise BuildError(f"{self.out}: is there already; {ANOTHER}, or remove it")

    def publish(self) -> None:
        """Move the content of `path` to `out`, complete and on disk.

        Raises BuildError if `out` has appeared meanwhile, or has got files of others.
        """
        sync_tree(self.path)
        if self._replaces:
            self._check_listed()
            self.out.rename(self.area / _REPLACED)
        try:
            self.path.rename(self.out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise BuildError(
                f"{self.out}: has appeared during the work; move it away and run this again"
            ) from None
        sync(self.area)
        sync(self.area.parent)

    def tidy(self, *, keep: bool) -> None:
        """Remove what is in the work directory, with the plans unless they are kept. An old bundle that lost its name
        before the new one had it gets it back.
        """
        if (old := self.area / _REPLACED).exists() and not os.path.lexists(self.out):
            old.rename(self.out)
        places = [self.scratch, old, self.path]
        if keep and (self.path / PLANS).is_dir():
            places[2:] = [place for place in self.path.iterdir() if place.name != PLANS]
        for place in places:
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)


def check_out(out: Path) -> None:
    """Raise BuildError if `out` cannot become a bundle: a file, a link, or a directory with other content."""
    check_place(out)
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        read_manifest(out)
    except BundleError as error:
        why = f" ({error})" if (out / MANIFEST).is_file() else ""
        raise BuildError(
            f"{out}: exists, is not empty and is not a bundle that this version can replace{why}; {ANOTHER}, or remove "
            "it yourself"
        ) from None


def check_place(out: Path) -> None:
    """Raise BuildError if `out` is a file or a symbolic link."""
    if out.is_symlink():
        raise BuildError(
            f"{out}: is a symbolic link to {os.readlink(out)}; put a directory there, or {ANOTHER}"
        )
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out}: is a file; {ANOTHER}")


@contextmanager
def workspace(out: Path) -> Iterator[Workspace]:
    """The work directory beside `out`, for one process at a time, empty but for plans of an interrupted run.

    Raises BuildError if the place cannot be written, or another process holds it.
    """
    out = Path(os.path.abspath(out))
    place, keep = Workspace(out, out.with_name(f".{out.name}.dflash-trt-work")), False
    with ExitStack() as held:
        with writing(out, ANOTHER):
            check_place(out)
            out.parent.mkdir(parents=True, exist_ok=True)
            if not held.enter_context(held_folder(place.area)):
                raise BuildError(f"{out}: another process is writing it; wait for it, or {ANOTHER}")
            place.tidy(keep=True)
        try:
            for folder in (place.path, place.scratch):
                folder.mkdir(exist_ok=True)
            yield place
        except BaseException as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            keep = not (full or isinstance(error, MemoryError))  # else there is no room for the work
            name_instead(error, place.area, out, but=place.path / PLANS if keep else None)
            raise
        finally:
            place.tidy(keep=keep)


@dataclass(frozen=True, slots=True)
class Input:
    """A file at the time its digest was computed. `stamp`: see `disk.stamp`."""

    source: Path
    stamp: tuple[int, int, int, int]
    sha256: str

    def check(self) -> None:
        """Raise BuildError if the file has changed since."""
        if stamp(self.source.stat()) != self.stamp:
            raise BuildError(
                f"{self.source}: was changed during the build; build again when nothing writes to it"
            )


def read_inputs(wanted: Mapping[str, Path], progress: Progress) -> dict[str, Input]:
    """Compute the digests of `wanted`: name inside the bundle -> file."""
    sources = {name: source.resolve() for name, source in wanted.items()}
    total = sum(source.stat().st_size for source in sources.values())
    done, inputs = 0, {}
    progress("digest", done, total)
    with ThreadPoolExecutor() as threads:
        for name, file in zip(sources, threads.map(_read_input, sources.values()), strict=True):
            inputs[name] = file
            progress("digest", done := done + file.stamp[2], total)
    return inputs


def _read_input(source: Path) -> Input:
    file = Input(source, stamp(source.stat()), digest(source))
    file.check()
    return file


def key_of(manifest: Mapping[str, Any], inputs: Mapping[str, Input], generated: Mapping[str, str]) -> str:
    """The key of a bundle: a digest of its manifest so far and of its inputs' digests.

    generated: name -> sha256 of files that the build makes itself.
    """
    digests = {name: file.sha256 for name, file in inputs.items()} | dict(generated)
    return hashlib.sha256(json.dumps([manifest, digests], sort_keys=True).encode()).hexdigest()


def bring(
    inputs: Mapping[str, Input], place: Workspace, progress: Progress, *, link: bool
) -> dict[str, dict[str, Any]]:
    """Put `inputs` into the work directory. Returns the manifest's entries.

    Files of the scratch directory are hard links if the file system allows it; with `link`, weights are, too.

    Raises BuildError if a file changed meanwhile, or if a copy does not fit on the disk.
    """
    entries: dict[str, dict[str, Any]] = {}
    to_copy: dict[str, Input] = {}
    for name, file in inputs.items():
        (place.path / name).parent.mkdir(parents=True, exist_ok=True)
        entries[name] = {"size": file.stamp[2], "sha256": file.sha256}
        scratch = file.source.is_relative_to(place.scratch)
        shared = link and file.source.suffix == ".safetensors" and not scratch
        if not ((scratch or shared) and _linked(file.source, place.path / name)):
            to_copy[name] = file
        elif shared:
            entries[name]["mtime_ns"] = file.stamp[3]
    total, free = sum(entries[name]["size"] for name in to_copy), shutil.disk_usage(place.path).free
    if total > free:
        raise BuildError(
            f"{place.out}: needs {total} bytes for copies, but its file system has {free} free; make room, "
            f"{ANOTHER}{LINKED}"
        )
    done = 0
    for name, file in to_copy.items():
        progress("copy weights", done, total)
        copy(file.source, place.path / name)
        done += entries[name]["size"]
    progress("copy weights", total, total)
    for file in inputs.values():
        file.check()
    return entries


def _linked(source: Path, destination: Path) -> bool:
    """Make a hard link. False where that is impossible: on another file system, or on one without links."""
    try:
        os.link(source, destination)
    except OSError:
        return False
    return True
