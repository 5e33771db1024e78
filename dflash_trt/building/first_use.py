"""Bundles of known pairs, built into a cache when they are first used."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from dflash_trt.building.progress import progress_display, say
from dflash_trt.bundle.manifest import MANIFEST, Bundle, Check, digest
from dflash_trt.bundle.workspace import ANOTHER, LINKED
from dflash_trt.checkpoint.catalogue import NAMES, KnownPair, known_configs, known_pair
from dflash_trt.engines import registry
from dflash_trt.engines.packages import installation
from dflash_trt.errors import BuildError, BundleError, did_you_mean
from dflash_trt.files.disk import cache_folder, cached_in, whole_file
from dflash_trt.hardware import compute_capabilities

_log = logging.getLogger(__name__)


def open_bundle(bundle: str | Path, check: Check, engine: str = registry.AUTO) -> Bundle:
    """The bundle in a directory; or that of a known pair, given by its name as a `str`, from the cache.

    The cache is the folder `bundles` of DFLASH_TRT_CACHE, by default of ~/.cache/dflash-trt. A bundle that is missing
    there, damaged, or of other checkpoints than this package has, is built for `engine`, "auto" being the one that this
    machine runs best.

    Raises BundleError, also for a directory with a bundle for another engine or without weights, and for a pair
    whatever `build` raises.
    """
    if engine != registry.AUTO:
        registry.find(engine)
    pair = known_pair(bundle) if isinstance(bundle, str) and not os.path.lexists(bundle) else None
    if pair is None:
        check_path(Path(bundle))
        opened = Bundle.open(bundle, check)
        if opened.manifest["weights"] == "none":
            raise BundleError(
                f"{bundle}: was built with --weights none and cannot run; build it with its weights"
            )
        if engine not in (registry.AUTO, built_for := opened.manifest["engine"]):
            raise BundleError(f"{bundle}: was built for {built_for}, and --engine is {engine}; leave it out")
        return opened
    name, best = pair.name, registry.best_here().engine if engine == registry.AUTO else engine
    if best != registry.DEFAULT:  # plans are for these GPUs, and torch computes in BF16 on a GPU
        name += f"-{best}" + "".join(f"-sm{sm}" for sm in sorted(set(compute_capabilities())))
    place = cache_folder() / "bundles" / name
    note, inputs = place.parent / f".{name}.inputs", _inputs(pair)
    if cached := _cached(place, note, inputs, check):  # also in a cache that cannot be written
        return cached
    from filelock import FileLock  # slow to import, and only needed here, as is `build`

    with ExitStack() as held:
        with cached_in(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(place.parent / f".{name}.first-use"))
        if cached := _cached(place, note, inputs, check):  # another process has built it meanwhile
            return cached
        entry = registry.find(best)
        if lacking := entry.lacking():
            raise BundleError(
                f"{pair.name}: --engine {best} needs {', '.join(lacking)}, not installed here: {installation(entry)}"
            )
        from dflash_trt.building.build import build

        say(f"building {pair.name} into {place} (once)")
        with progress_display() as progress:
            try:
                built = build(pair.name, None, place, engine=engine, force=True, progress=progress)
            except BuildError as error:
                cache = "set DFLASH_TRT_CACHE to another directory"
                raise BuildError(str(error).replace(LINKED, "").replace(ANOTHER, cache)) from error
        # The bundle has them in other files if the build quantized them.
        with whole_file(note) as file:
            file.write(f"{built.manifest['key']} {inputs}".encode())
        return built


def _cached(place: Path, note: Path, inputs: str, check: Check) -> Bundle | None:
    """The bundle in the cache, if it is whole and was built from these inputs."""
    with suppress(BundleError):
        bundle = Bundle.open(place, check)
        if note.is_file() and note.read_text() == f"{bundle.manifest['key']} {inputs}":
            _log.info("%s is in the cache: %s", place.name, place)
            return bundle
    return None


def check_path(path: Path) -> None:
    """Raise BundleError for a directory that does not exist: the name of a pair, or what may have been meant.

    A pair's name says how to build it, or where it is.
    """
    if os.path.lexists(path):
        return
    pair = known_pair(str(path))
    if pair is None:
        beside = [str(manifest.parent) for manifest in path.parent.glob(f"*/{MANIFEST}")]
        near = did_you_mean(str(path), [*beside, *NAMES])
        raise BundleError(
            f"{path}: neither the directory of a bundle nor the name of a pair{near}; "
            f"`dflash-trt pairs` lists the names, and `dflash-trt build --out {path}` makes a bundle there"
        )
    built = Path("bundles") / pair.name
    way = (
        f"give {built}"
        if built.is_dir()
        else f"build one with `dflash-trt build --target {path}`, and give {built}"
    )
    raise BundleError(f"{path}: is the name of a pair, not the directory of a bundle; {way}")


def _inputs(pair: KnownPair) -> str:
    """A digest of the weights of a pair that this package has. An update may bring others."""
    parts = []
    for repository, folder in zip(
        (pair.target_repo, pair.drafter_repo), known_configs(pair.name), strict=True
    ):
        if repository is None:
            parts += [digest(file) for file in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
