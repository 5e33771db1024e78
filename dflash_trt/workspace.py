"""How a bundle comes about on disk: worked on beside its place, and renamed there when it is whole (docs/bundle.md)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_trt import bundle
from dflash_trt.bundle import Bundle
from dflash_trt.errors import BuildError, BundleError

# Called as progress(step, done, total); units are files or bytes, whatever the step counts.
Progress = Callable[[str, int, int], None]

_DIGESTS = "digests.json"


def silent(step: str, done: int, total: int) -> None:
    pass


def check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out}: is a file; choose another --out")
    if out.is_dir() and any(out.iterdir()) and not (out / bundle.MANIFEST).is_file():
        raise BuildError(f"{out}: exists, is not empty and is not a bundle; choose another --out")


def key_of(manifest: Mapping[str, Any], digests: Mapping[str, Mapping[str, Any]]) -> str:
    """The key of a bundle: everything that its manifest says so far, and the digests of what it is made from."""
    inputs = {name: digests[name]["sha256"] for name in sorted(digests)}
    return hashlib.sha256(json.dumps([manifest, inputs], sort_keys=True).encode()).hexdigest()


def existing_bundle(out: Path, key: str, *, force: bool) -> Bundle | None:
    """The bundle in `out`, where it is whole and of this key; a damaged one is simply built again.

    Raises BuildError where a whole one of another key is there and `force` does not allow to replace it.
    """
    if not (out / bundle.MANIFEST).is_file():
        return None
    try:
        found = Bundle.open(out)
    except BundleError:
        return None
    if found.manifest["key"] == key:
        return found
    if not force:
        raise BuildError(
            f"{out}: holds a bundle of other inputs or options (key {found.manifest['key'][:12]}); "
            "choose another --out, or replace it with --force"
        )
    return None


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """`.NAME.building` beside the bundle, held by one build at a time, kept when the build is interrupted."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.building"
    lock = out.parent / f".{out.name}.lock"
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildError(
                f"{out}: another build is writing this bundle; wait for it, or choose another --out"
            ) from None
        try:
            work.mkdir(exist_ok=True)
            yield work
        finally:
            lock.unlink(missing_ok=True)


def gather(wanted: Mapping[str, Path], work: Path, progress: Progress, keep: str = "") -> dict[str, Path]:
    """Link or copy `wanted` (name inside the bundle -> source) into the workspace.

    What else lies there goes, except in the folder `keep`.
    """
    for i, (name, source) in enumerate(wanted.items()):
        progress("link weights", i, len(wanted))
        _bring(source.resolve(), work / name)
    progress("link weights", len(wanted), len(wanted))
    for stale in {p for p in work.rglob("*") if p.is_file()} - {work / name for name in [*wanted, _DIGESTS]}:
        if not (keep and stale.is_relative_to(work / keep)):
            stale.unlink()
    return {name: work / name for name in wanted}


def _bring(source: Path, destination: Path) -> None:
    """Weights are hard-linked where that is possible, and copied where it is not."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists():
        same = destination.stat()
        origin = source.stat()
        if same.st_ino == origin.st_ino or (same.st_size, same.st_mtime_ns) == (
            origin.st_size,
            origin.st_mtime_ns,
        ):
            return
        destination.unlink()
    if source.suffix == ".safetensors":
        try:
            os.link(source, destination)
        except OSError:
            pass  # another file system, or one without links
        else:
            return
    partial = destination.with_name(destination.name + ".part")
    shutil.copyfile(source, partial)
    shutil.copystat(source, partial)
    partial.rename(destination)


def digest_files(files: dict[str, Path], work: Path, progress: Progress) -> dict[str, dict[str, Any]]:
    """Size and sha256 of each file; those that an interrupted build already worked out are taken over."""
    memo_file = work / _DIGESTS
    try:
        memo = json.loads(memo_file.read_text())
    except (OSError, ValueError):
        memo = {}
    total = sum(path.stat().st_size for path in files.values())
    done, found = 0, {}
    for name, path in files.items():
        progress("digest", done, total)
        stat = path.stat()
        stamp = f"{name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
        if stamp not in memo:
            memo[stamp] = describe_file(path)
            memo_file.write_text(json.dumps(memo))
        found[name] = memo[stamp]
        done += stat.st_size
    progress("digest", total, total)
    return found


def describe_file(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": bundle.digest(path)}


def finish(work: Path, out: Path, manifest: dict[str, Any]) -> None:
    (work / _DIGESTS).unlink(missing_ok=True)
    with (work / bundle.MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    if out.exists():
        old = out.parent / f".{out.name}.replaced"
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        work.rename(out)
        shutil.rmtree(old)
    else:
        work.rename(out)
