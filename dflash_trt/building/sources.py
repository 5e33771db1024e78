"""Find the checkpoints of a pair: in a directory, in a package, or on the hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from dflash_trt.checkpoint import gguf
from dflash_trt.checkpoint.catalogue import NAMES, SHIPPED, KnownPair, known_configs, known_pair
from dflash_trt.checkpoint.pair import Source
from dflash_trt.engines.base import Weights
from dflash_trt.errors import CheckpointError
from dflash_trt.models.configs import read_drafter_config, read_target_config

Role = Literal["target", "drafter"]

_REPOSITORY = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_CONFIGS = ["config.json", "generation_config.json"]
# The hub matches patterns with fnmatch. Its * crosses slashes, so subdirectories are excluded separately.
_FILES = ["*.safetensors", "*.json", "*.jinja"]


def find_sources(target: str, drafter: str | None, weights: Weights) -> tuple[Source, Source]:
    """Both checkpoints of a pair. With weights "none", those of a known pair are configurations alone."""
    if weights == "none" and drafter is None and not Path(target).is_dir():
        directories = known_configs(target)
        return Source(directories[0], target), Source(directories[1], target)
    return resolve_pair(target, drafter)


def resolve_pair(target: str, drafter: str | None = None) -> tuple[Source, Source]:
    """Both checkpoints of a pair. Without a drafter, `target` must be a known pair, given by name or repository."""
    if drafter is None:
        pair = None if Path(target).is_dir() else known_pair(target)
        if pair is None:
            raise CheckpointError(
                f"--target {target}: no drafter is known for it; give one with --drafter, or give a known pair as "
                f"the target: {NAMES}"
            )
        drafter = pair.drafter_repo or pair.name
    return resolve(target, "target"), resolve(drafter, "drafter")


def resolve(name_or_path: str, role: Role) -> Source:
    """A checkpoint as a local directory.

    `name_or_path` is tried, in this order, as: a directory; a GGUF file or a target in a Python package, both
    converted into a cache; the name of a known pair; a hub repository `org/name`. A name or repository may end in
    `@revision`: a branch, a tag or a commit.

    The hub's environment variables apply (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Configurations are fetched and read
    before weights, so an unsupported checkpoint is not downloaded.

    Raises:
        CheckpointError: nothing has this name, this kind of model is not supported, or the hub does not provide it.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return Source(path)
    if role == "target" and (path.suffix == ".gguf" or name_or_path in gguf.PACKAGED):
        file = gguf.packaged_target(name_or_path) if name_or_path in gguf.PACKAGED else path
        return Source(gguf.cached_checkpoint(file))
    pair = known_pair(name_or_path)
    repo = name_or_path
    name, at, revision = name_or_path.partition("@")
    if pair is not None and pair.name == name.lower():
        known = pair.target_repo if role == "target" else pair.drafter_repo
        if known is not None:
            repo = known + at + revision
        elif not at:
            return _shipped(pair, role)
    match = _REPOSITORY.fullmatch(repo)
    if match is None:
        raise CheckpointError(
            f"--{role} {name_or_path}: neither a directory, nor a hub repository org/name[@revision], "
            f"nor a known pair: {NAMES}"
            + (f"; nor a GGUF file, nor in a package: {', '.join(gguf.PACKAGED)}" if role == "target" else "")
        )
    return _snapshot(match["repo"], match["revision"], role)


def _shipped(pair: KnownPair, role: Role) -> Source:
    directory = SHIPPED / pair.name / role
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: missing; the installation is incomplete, install dflash-trt again"
        )
    return Source(directory)


def _snapshot(repo: str, revision: str | None, role: Role) -> Source:
    from huggingface_hub import snapshot_download  # slow to import, and only needed for the hub

    commit = revision
    try:
        for patterns in (_CONFIGS, _FILES):
            directory = Path(
                snapshot_download(repo, revision=commit, allow_patterns=patterns, ignore_patterns=["*/*"])
            )
            commit = directory.name  # the snapshot's directory is named after its commit
            if role == "target":
                read_target_config(directory)
            else:
                read_drafter_config(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{repo}: {error}") from None
    except Exception as error:
        # The hub raises the errors of its HTTP client, which differ between versions.
        files = "config.json, the safetensors files" + (", tokenizer.json" if role == "target" else "")
        raise CheckpointError(
            f"{repo}: the hub does not provide it ({_first_line(error)}); "
            f"a local directory with {files} can be given as --{role} instead"
        ) from error
    return Source(directory, repo, commit)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
