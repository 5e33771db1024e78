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

from dflash_trt.bundle.manifest import digest
from dflash_trt.bundle.workspace import Progress, Workspace
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import copy, stamp


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
    for name, source in sources.items():
        progress("digest", done, total)
        now = stamp(source.stat())
        inputs[name] = Input(source, now, digest(source))
        inputs[name].check()
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
        own = file.source.is_relative_to(place.scratch)
        shared = link and file.source.suffix == ".safetensors" and not own
        if not ((own or shared) and _linked(file.source, place.path / name)):
            to_copy[name] = file
        elif shared:
            entries[name]["mtime_ns"] = file.stamp[3]
    total, free = sum(entries[name]["size"] for name in to_copy), shutil.disk_usage(place.path).free
    if total > free:
        raise BuildError(
            f"{place.out}: needs {total} bytes for copies, but its file system has {free} free; make room, choose "
            "another --out, or use the checkpoint's own files with --weights link"
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
