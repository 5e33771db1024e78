"""The pairs known by name, and where checkpoints come from: a directory, the package, or the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dflash_trt.checkpoint.config import read_drafter_config, read_target_config
from dflash_trt.errors import CheckpointError

Role = Literal["target", "drafter"]

_SHIPPED = Path(__file__).resolve().parent.parent / "shipped"
_KNOWN_CONFIGS = Path(__file__).resolve().parent / "known"
_REPOSITORY = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?")
_CONFIGS = ["config.json", "generation_config.json"]
# The hub matches patterns with fnmatch, whose * crosses slashes: subdirectories are excluded separately.
_FILES = ["*.safetensors", "*.json", "*.jinja"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter for it. Pairs without repositories come with the package.

    `thinking`: the mode of the target whose answers the drafter was trained on, and `warning` what another mode
    costs; both may be empty. `unverified`: fields of the drafter's config.json as known_configs gives it that follow
    from the target, not from the published file. `family` is the target's model_type.
    """

    name: str
    target_repo: str | None
    drafter_repo: str | None
    family: str
    block_size: int
    note: str
    thinking: str = ""
    warning: str = ""
    unverified: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a checkpoint lies, and the hub repository and commit it is a snapshot of, if it is one."""

    directory: Path
    repo: str | None = None
    revision: str | None = None


_THINKING = (
    "the drafter was trained on answers without thinking: switch it off with "
    'chat_template_kwargs={"enable_thinking": False}, or far fewer drafts are accepted'
)
_DERIVED = ("dflash_config.mask_token_id", "max_position_embeddings", "rms_norm_eps", "rope_theta")


PAIRS = (
    Pair("tiny", None, None, "qwen3", 8, "shipped: arithmetic, short Python, JSON tool calls, chat"),
    Pair(
        "tiny-gpt-oss",
        None,
        None,
        "gpt_oss",
        8,
        "shipped: the same, by a gpt-oss architecture with MXFP4 experts",
    ),
    Pair(
        "qwen3-4b",
        "Qwen/Qwen3-4B",
        "z-lab/Qwen3-4B-DFlash-b16",
        "qwen3",
        16,
        "for non-thinking mode",
        thinking="off",
        warning=_THINKING,
    ),
    Pair(
        "qwen3-8b",
        "Qwen/Qwen3-8B",
        "z-lab/Qwen3-8B-DFlash-b16",
        "qwen3",
        16,
        "for non-thinking mode",
        thinking="off",
        warning=_THINKING,
    ),
    Pair(
        "qwen3-coder-30b-a3b",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "qwen3_moe",
        16,
        "code; the target does not think",
        unverified=_DERIVED,
    ),
    Pair(
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        "llama",
        10,
        "chat; the target's repository is gated",
        unverified=_DERIVED,
    ),
    Pair(
        "gpt-oss-20b",
        "openai/gpt-oss-20b",
        "z-lab/gpt-oss-20b-DFlash",
        "gpt_oss",
        8,
        "reasoning",
        thinking="on",
        unverified=("rope_scaling",),
    ),
    Pair(
        "gpt-oss-120b",
        "openai/gpt-oss-120b",
        "z-lab/gpt-oss-120b-DFlash",
        "gpt_oss",
        10,
        "reasoning; published figures are for medium effort",
        thinking="on",
        unverified=("rope_scaling",),
    ),
)
_NAMES = ", ".join(pair.name for pair in PAIRS)


def resolve_pair(target: str, drafter: str | None = None) -> tuple[Source, Source]:
    """Both checkpoints of a pair. Without a drafter, `target` must be a known pair, by name or repository."""
    if drafter is None:
        pair = None if Path(target).is_dir() else known_pair(target)
        if pair is None:
            raise CheckpointError(
                f"--target {target}: no drafter is known for it; give one with --drafter, "
                f"or the name of a known pair as the target: {_NAMES}"
            )
        drafter = pair.drafter_repo or pair.name
    return resolve(target, "target"), resolve(drafter, "drafter")


def resolve(name_or_path: str, role: Role) -> Source:
    """A checkpoint as a local directory.

    `name_or_path` is, in this order: a directory, the name of a known pair, a hub repo `org/name`. The last two
    may end in `@revision`: a branch, a tag or a commit.
    The hub's own environment variables hold (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Configurations are fetched
    and read before weights, so that what cannot be used is not downloaded.

    Raises:
        CheckpointError: nothing by that name, a kind of model that this version does not convert, or the hub
            does not give it.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return Source(path)
    pair = known_pair(name_or_path)
    repo = name_or_path
    name, at, revision = name_or_path.partition("@")
    if pair is not None and pair.name == name:
        known = pair.target_repo if role == "target" else pair.drafter_repo
        if known is not None:
            repo = known + at + revision
        elif not at:
            return _shipped(pair, role)
    match = _REPOSITORY.fullmatch(repo)
    if match is None:
        raise CheckpointError(
            f"--{role} {name_or_path}: neither a directory, nor a hub repository org/name[@revision], "
            f"nor a known pair: {_NAMES}"
        )
    return _snapshot(match["repo"], match["revision"], role)


def known_configs(name: str) -> tuple[Path, Path]:
    """Directories of a known pair's target and drafter with config.json and no weights, for what needs no weights.

    Raises:
        CheckpointError: no pair is known by that name.
    """
    pair = known_pair(name)
    if pair is None:
        raise CheckpointError(f"{name}: no pair is known by that name; known are {_NAMES}")
    root = (_SHIPPED if pair.target_repo is None else _KNOWN_CONFIGS) / pair.name
    return root / "target", root / "drafter"


def known_pair(name: str) -> Pair | None:
    """The pair that a name or a repository, with or without @revision, stands for."""
    name = name.partition("@")[0]
    return next((pair for pair in PAIRS if name in (pair.name, pair.target_repo, pair.drafter_repo)), None)


def _shipped(pair: Pair, role: Role) -> Source:
    directory = _SHIPPED / pair.name / role
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory}: missing; the installation is incomplete, install dflash-trt again"
        )
    return Source(directory)


def _snapshot(repo: str, revision: str | None, role: Role) -> Source:
    from huggingface_hub import snapshot_download  # slow to import, and only the hub needs it

    commit = revision
    try:
        for patterns in (_CONFIGS, _FILES):
            directory = Path(
                snapshot_download(repo, revision=commit, allow_patterns=patterns, ignore_patterns=["*/*"])
            )
            commit = directory.name  # a snapshot's directory is named by its commit
            if role == "target":
                read_target_config(directory)
            else:
                read_drafter_config(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{repo}: {error}") from None
    except Exception as error:
        # The hub raises what its HTTP client raises, and that differs between its versions.
        files = "config.json, the safetensors files" + (", tokenizer.json" if role == "target" else "")
        raise CheckpointError(
            f"{repo}: the hub does not give it ({_first_line(error)}); "
            f"a local directory with {files} can be given as --{role} instead"
        ) from error
    return Source(directory, repo, commit)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__
