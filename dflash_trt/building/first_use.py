"""Bundles of known pairs, built into a cache when they are first used."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from dflash_trt.building.build import build
from dflash_trt.building.progress import progress_display
from dflash_trt.bundle.manifest import Bundle, Check, digest
from dflash_trt.checkpoint.catalogue import KnownPair, known_configs, known_pair
from dflash_trt.errors import BundleError
from dflash_trt.files.disk import cache_folder

_log = logging.getLogger(__name__)


def open_bundle(bundle: str | Path, check: Check) -> Bundle:
    """The bundle in a directory; or that of a known pair, given by its name as a `str`, from the cache.

    The cache is the folder `bundles` of DFLASH_TRT_CACHE, by default of ~/.cache/dflash-trt. A bundle that is missing
    there, damaged, or of other checkpoints than this package has, is built, for ONNX Runtime.

    Raises BundleError, and for a pair whatever `build` raises.
    """
    pair = known_pair(bundle) if isinstance(bundle, str) and not os.path.lexists(bundle) else None
    if pair is None:
        check_path(Path(bundle))
        return Bundle.open(bundle, check)
    place = cache_folder() / "bundles" / pair.name
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.parent / f".{pair.name}.first-use"):  # another process may be building it
        with suppress(BundleError):
            found = Bundle.open(place, check)
            if _is_current(found, pair):
                _log.info("%s is in the cache: %s", pair.name, place)
                return found
        print(f"building {pair.name} into {place} (once)", file=sys.stderr)
        with progress_display() as progress:
            return build(pair.name, None, place, force=True, progress=progress)


def check_path(path: Path) -> None:
    """Raise BundleError for the name of a pair where a bundle is expected: how to build it, or where it is."""
    pair = None if os.path.lexists(path) else known_pair(str(path))
    if pair is None:
        return
    built = Path("bundles") / pair.name
    way = (
        f"give {built}"
        if built.is_dir()
        else f"build one with `dflash-trt build --target {path}`, and give {built}"
    )
    raise BundleError(f"{path}: is the name of a pair, not the directory of a bundle; {way}")


def _is_current(bundle: Bundle, pair: KnownPair) -> bool:
    """Whether a bundle has the checkpoints that come with this package; an update may bring other ones."""
    listed = bundle.manifest["files"]
    for role, repository, folder in zip(
        ("target", "drafter"), (pair.target_repo, pair.drafter_repo), known_configs(pair.name), strict=True
    ):
        if repository is None:
            for file in folder.glob("*.safetensors"):
                entry = listed.get(f"weights/{role}/{file.name}")
                if entry is None or entry["sha256"] != digest(file):
                    return False
    return True
