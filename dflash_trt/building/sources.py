"""Find the checkpoints of a pair: in a directory, in a package, or on the hub."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from dflash_trt.checkpoint import gguf, mtp
from dflash_trt.checkpoint.catalogue import NAMES, PAIRS, SHIPPED, KnownPair, known_configs, known_pair
from dflash_trt.checkpoint.pair import Source
from dflash_trt.checkpoint.tensors import INDEX, SINGLE, read_index
from dflash_trt.engines.base import Weights
from dflash_trt.errors import CheckpointError, UsageError, did_you_mean, show_name
from dflash_trt.files.reading import read_object
from dflash_trt.models.configs import read_drafter_config, read_target_config

Role = Literal["target", "drafter"]
_log = logging.getLogger(__name__)

_REPOSITORY = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_CONFIGS = ["config.json", "generation_config.json"]
# The hub matches patterns with fnmatch. Its * crosses slashes, so subdirectories are excluded separately.
_FILES = ["*.json", "*.jinja"]
# Files beside the weights of some drafters that change what they draft.
_SIDE_FILES = ("mask_embedding.pt", "embeddings.pt")
# Small files that a repository may have or not, and what builds without them get wrong if it has them.
_OPTIONAL = {
    "target": {
        "generation_config.json": "the tokens that end an answer and the defaults of sampling",
        "chat_template.jinja": "the texts of chats",
    },
    "drafter": dict.fromkeys(_SIDE_FILES, "the drafts"),
}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def find_sources(
    target: str,
    drafter: str | None,
    weights: Weights,
    *,
    no_drafter: bool = False,
    stored: Collection[Role] = (),
) -> tuple[Source, Source | None]:
    """The checkpoints of a target and its drafter, by default the known one. A line says so if none is known. "mtp" is
    the drafter in the target's own checkpoint. With weights "none", those of a known pair are configurations alone.
    `no_drafter`: the target alone. `stored`: whose GGUF file keeps its integers.
    """
    if no_drafter and drafter is not None:
        raise UsageError(f"--drafter is {drafter}, and --no-drafter asks for none: leave one of them out")
    if weights == "none" and drafter in (None, mtp.MTP) and not Path(target).is_dir():
        directories = known_configs(target)
        folder = directories[1] if drafter is None else mtp.own_drafter(directories[0], weights=False)
        return Source(directories[0], target), None if no_drafter else Source(folder, target)
    if drafter is None and not no_drafter and not Path(target).is_dir() and (pair := known_pair(target)):
        drafter = pair.drafter_repo or pair.name
    source = resolve(target, "target", stored="target" in stored)
    if drafter == mtp.MTP:
        folder = mtp.own_drafter(source.directory, weights=weights != "none")
        return source, replace(source, directory=folder)
    if drafter is not None:
        return source, resolve(drafter, "drafter", stored="drafter" in stored)
    if not no_drafter:
        one = "--drafter mtp takes that in its checkpoint" if mtp.has_own_drafter(source.directory) else ""
        print(
            f"{target}: no drafter is known for it, so drafts come from each request's own text; "
            f"{one or '--drafter gives one'}",
            file=sys.stderr,
        )
    return source, None


def built_in(target: str, drafter: str | None, *, no_drafter: bool = False) -> KnownPair | None:
    """The pair whose built-in configurations find_sources gives without weights, if it gives any."""
    pair = known_pair(target) if drafter is None and not Path(target).is_dir() else None
    if pair is None or not no_drafter:
        return pair
    return replace(pair, unverified=tuple(name for name in pair.unverified if name.startswith("target.")))


def resolve(name_or_path: str, role: Role, *, stored: bool = False) -> Source:
    """A checkpoint as a local directory.

    `name_or_path` is tried, in this order, as: a directory; a GGUF file, or a target in a Python package, both
    converted into a cache; the name of a known pair; a hub repository `org/name`. A name or repository may end in
    `@revision`: a branch, a tag or a commit. `stored`: the integers of a GGUF file stay integers.

    The hub's environment variables apply (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Configurations are fetched and read
    before weights, so an unsupported checkpoint is not downloaded.

    Raises:
        CheckpointError: nothing has this name, this kind of model is not supported, or the hub does not provide it.
    """
    if not name_or_path:
        raise CheckpointError(f"{role} is '', expected a name, a directory or a repository")
    path = Path(name_or_path).expanduser()
    _check_path(name_or_path, role)
    if path.is_dir():
        return Source(path)
    if role == "drafter" and path.suffix == ".gguf":
        return Source(gguf.cached_checkpoint(path, stored=stored, drafter=True))
    if role == "target" and (path.suffix == ".gguf" or name_or_path.lower() in gguf.PACKAGED):
        packaged = name_or_path.lower() in gguf.PACKAGED
        file = gguf.packaged_target(name_or_path.lower()) if packaged else path
        return Source(gguf.cached_checkpoint(file, stored=stored))
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
        known_names = [*NAMES, *(pair.target_repo for pair in PAIRS if pair.target_repo)]
        raise CheckpointError(
            f"{role} {name_or_path}{did_you_mean(name_or_path, known_names)}: neither a directory, nor a hub "
            f"repository org/name[@revision], nor a known pair: {', '.join(NAMES)}"
            + "; nor a GGUF file"
            + (f", nor in a package: {', '.join(gguf.PACKAGED)}" if role == "target" else "")
        )
    return _snapshot(match["repo"], match["revision"], role)


def _check_path(name: str, role: Role) -> None:
    """Refuse a path by what it is. A name that no path has may be a pair's, or a repository's."""
    path = Path(name).expanduser()
    parts = Path(name.partition("@")[0]).parts  # a revision may have slashes of its own
    if path.is_dir():
        _check_directory(path, role)
    elif path.exists() and path.suffix != ".gguf":
        _check_file(path, role)
    elif not path.exists() and (path.is_absolute() or name.startswith(("./", "../")) or len(parts) > 2):
        raise CheckpointError(f"{role} {name}: no such file or directory")


def _shipped(pair: KnownPair, role: Role) -> Source:
    directory = SHIPPED / pair.name / role
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: missing; the installation is incomplete, install dflash-trt again"
        )
    return Source(directory)


def _snapshot(repo: str, revision: str | None, role: Role) -> Source:
    from huggingface_hub import snapshot_download  # slow to import, and only needed for the hub

    commit, patterns = revision, [*_CONFIGS, *(_SIDE_FILES if role == "drafter" else ())]
    try:
        for step in range(3):  # configuration, other small files, weights that the index names
            directory = Path(
                snapshot_download(repo, revision=commit, allow_patterns=patterns, ignore_patterns=["*/*"])
            )
            patterns = _weights(directory) if step else _FILES
            commit = directory.name  # the snapshot's directory is named after its commit
            if role == "target":
                read_target_config(directory)
            else:
                read_drafter_config(directory)
                _check_side_files(path.name for path in directory.iterdir())
        _warn_of_missing(repo, directory, role)
    except CheckpointError as error:
        raise CheckpointError(f"{repo}: {error}") from None
    except Exception as error:
        # The hub raises the errors of its HTTP client, which differ between versions.
        raise _hub_error(repo, error, role) from error
    return Source(directory, repo, commit)


def _warn_of_missing(repo: str, directory: Path, role: Role) -> None:
    """Warn of a file that the repository may have and a cache that was filled offline, or in part, lacks."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for name, changes in _OPTIONAL[role].items():
        if try_to_load_from_cache(repo, name, revision=directory.name) is not None:
            continue  # there, or known to be in no such commit
        if name == "chat_template.jinja" and _has_template(directory):
            continue
        try:
            hf_hub_download(repo, name, revision=directory.name)
        except LocalEntryNotFoundError:  # also an EntryNotFoundError
            _log.warning(
                "%s: the cache has no %s, and the hub was not asked whether there is one, which would change %s; "
                "fetch it with a network: hf download %s %s --revision %s",
                *(repo, name, changes, repo, name, directory.name),
            )
        except EntryNotFoundError:
            pass


def _has_template(directory: Path) -> bool:
    config = directory / "tokenizer_config.json"
    return config.is_file() and bool(read_object(config).get("chat_template"))


def _weights(directory: Path) -> list[str]:
    """The files with a checkpoint's tensors."""
    if not (directory / INDEX).is_file():
        return [SINGLE]
    return sorted(set(read_index(directory).values()))


def _check_side_files(names: Iterable[str]) -> None:
    """Raise CheckpointError where a drafter has a file that would change its drafts and is not read."""
    if side := next((name for name in names if name in _SIDE_FILES), None):
        raise CheckpointError(
            f"{side} changes what this drafter drafts, and is not read, as loading a pickle runs code; put its tensors "
            "into the safetensors file, or take another drafter"
        )


def _check_directory(path: Path, role: str) -> None:
    """Raise CheckpointError for a directory of another kind, saying what it is and how to go on."""
    if (path / "manifest.json").is_file():
        raise CheckpointError(f"{path}: is a bundle already; give the checkpoint that it was built from")
    if (path / "adapter_config.json").is_file():
        base = read_object(path / "adapter_config.json").get("base_model_name_or_path")
        of = f" for {show_name(base)}" if isinstance(base, str) and base else ""
        raise CheckpointError(
            f"{path}: is a LoRA adapter{of}, not a whole model; merge it into its base model first (with PEFT: "
            f"merge_and_unload, then save_pretrained), and give that directory"
        )
    if (path / "config.json").exists():
        if role == "drafter":
            try:
                _check_side_files(file.name for file in path.iterdir())
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from None
        names = [file.name for file in sorted(path.iterdir()) if file.suffix in _PICKLED]
        if names and not any(path.glob("*.safetensors*")):
            raise CheckpointError(
                f"{path}: has weights in {show_name(names[0])}, which is not read, as loading a pickle runs code; "
                "save the model again as safetensors (with Transformers: save_pretrained)"
            )
        return
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        raise CheckpointError(f"{path}: holds GGUF files; give the file itself, {ggufs[0]}")
    raise CheckpointError(
        f"{path}: has no config.json; expected a checkpoint as Hugging Face keeps it: config.json, "
        "the safetensors files and, for a target, tokenizer.json"
    )


def _check_file(path: Path, role: str) -> None:
    """Raise CheckpointError for a file where a directory is expected."""
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: is a file; give its directory, with config.json: {path.parent}")
    raise CheckpointError(f"{path}: is a file; a {role} is a directory, a name or a repository")


def _hub_error(repo: str, error: Exception, role: str) -> CheckpointError:
    """The hub's error, with the way out. Raises an error of the disk as it is."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise error
    kinds = {kind.__name__ for kind in type(error).__mro__}
    token = "with a token: `hf auth login`, or the variable HF_TOKEN"
    if "GatedRepoError" in kinds:
        return CheckpointError(
            f"{repo}: is gated; accept its licence on https://huggingface.co/{repo}, then come back {token}"
        )
    if "RepositoryNotFoundError" in kinds:
        return CheckpointError(
            f"{repo}: the hub has no such repository, or it is private; check the name, or come back {token}"
        )
    if "RevisionNotFoundError" in kinds:
        return CheckpointError(
            f"{repo}: the hub has no such revision; leave out @REVISION for the newest one"
        )
    files = "config.json, the safetensors files" + (", tokenizer.json" if role == "target" else "")
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    reason = str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
    return CheckpointError(
        f"{repo}: cannot be fetched from the Hugging Face hub{offline} ({reason}); "
        f"a local directory with {files} does as well"
    )
