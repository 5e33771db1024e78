"""Put input files into a bundle: compute their digests, then copy or link them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.bundle import manifest as bundle
from dflash_trt.bundle.workspace import Progress, Workspace
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import clone, copy, stamp, write_object


@dataclass(frozen=True, slots=True)
class Input:
    """A file at the time its digest was computed. `stamp`: see `disk.stamp`."""

    source: Path
    stamp: tuple[int, int, int, int]
    sha256: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stamp[2]

    def check(self) -> None:
        """Raise BuildError if the file has changed since."""
        if stamp(self.source.stat()) != self.stamp:
            raise BuildError(
                f"{self.source}: was changed during the build; build again when nothing writes to it"
            )


def read_inputs(wanted: Mapping[str, Path], place: Workspace, progress: Progress) -> dict[str, Input]:
    """Compute the digests of `wanted` (name inside the bundle -> file). Digests of an interrupted build are reused."""
    try:
        memo = json.loads(place.digests.read_text())
    except (OSError, ValueError):
        memo = {}
    sources = {name: source.resolve() for name, source in wanted.items()}
    total = sum(source.stat().st_size for source in sources.values())
    done, inputs = 0, {}
    for name, source in sources.items():
        progress("digest", done, total)
        now = stamp(source.stat())
        if memo.get(name, {}).get("stamp") != list(now):
            (place.path / name).unlink(missing_ok=True)  # a copy of the old content
            memo[name] = {"stamp": now, "sha256": bundle.digest(source)}
            Input(source, now, memo[name]["sha256"]).check()
            write_object(place.digests, memo)
        inputs[name] = Input(source, now, memo[name]["sha256"])
        done += now[2]
    progress("digest", total, total)
    return inputs


def key_of(manifest: Mapping[str, Any], inputs: Mapping[str, Input], generated: Mapping[str, str]) -> str:
    """The key of a bundle: a digest of its manifest so far and of its inputs' digests.

    generated: name -> sha256 of files that the build makes itself.
    """
    digests = {name: file.sha256 for name, file in inputs.items()} | dict(generated)
    return hashlib.sha256(json.dumps([manifest, digests], sort_keys=True).encode()).hexdigest()


def bring(
    inputs: Mapping[str, Input], place: Workspace, progress: Progress, *, link: bool, keep: str = ""
) -> dict[str, dict[str, Any]]:
    """Put `inputs` into the work directory. Returns the manifest's entries.

    With `link`, weights are hard links if the file system allows it. Other files share blocks with their source if
    possible, and are copied otherwise. Files of the scratch directory are always linked. Anything else in the work
    directory is removed, except for its folder `keep`.

    Raises BuildError if a file changed meanwhile, or if a copy does not fit on the disk.
    """
    _remove_others(place.path, inputs, keep)
    to_copy = [name for name, file in inputs.items() if not _bring(name, file, place, link)]
    total = sum(inputs[name].size for name in to_copy)
    free = shutil.disk_usage(place.path).free
    if total > free:
        raise BuildError(
            f"{place.out}: needs {total} bytes for copies, but its file system has {free} free; make room, choose "
            "another --out, or use the checkpoint's own files with --weights link"
        )
    done = 0
    for name in to_copy:
        progress("copy weights", done, total)
        copy(inputs[name].source, place.path / name)
        done += inputs[name].size
    progress("copy weights", total, total)
    entries: dict[str, dict[str, Any]] = {}
    for name, file in inputs.items():
        file.check()
        entries[name] = {"size": file.size, "sha256": file.sha256}
        if _linkable(file, place, link) and (place.path / name).samefile(file.source):
            entries[name]["mtime_ns"] = file.stamp[3]
    return entries


def _linkable(file: Input, place: Workspace, link: bool) -> bool:
    return link and file.source.suffix == ".safetensors" and not file.source.is_relative_to(place.scratch)


def _bring(name: str, file: Input, place: Workspace, link: bool) -> bool:
    """Link or clone a file that is not there yet. Returns False if it has to be copied instead."""
    destination = place.path / name
    destination.parent.mkdir(parents=True, exist_ok=True)
    linkable = file.source.is_relative_to(place.scratch) or _linkable(file, place, link)
    if destination.exists():
        now = stamp(destination.stat())
        linked = now[:2] == file.stamp[:2]
        if now[2:] == file.stamp[2:] and (linkable or not linked):
            return True
        destination.unlink()
    return (linkable and hard_link(file.source, destination)) or clone(file.source, destination)


def hard_link(source: Path, destination: Path) -> bool:
    """Returns False if a hard link is impossible: on another file system, or on one without links."""
    try:
        os.link(source, destination)
    except OSError:
        return False
    return True


def describe_file(path: Path) -> dict[str, Any]:
    """The manifest's entry of a file that the build wrote."""
    return {"size": path.stat().st_size, "sha256": bundle.digest(path)}


def _remove_others(work: Path, wanted: Mapping[str, Any], keep: str) -> None:
    for folder, directories, files in os.walk(work):
        if keep and Path(folder) == work:
            directories[:] = [name for name in directories if name != keep]
        for name in files:
            path = Path(folder, name)
            if path.relative_to(work).as_posix() not in wanted:
                path.unlink()
