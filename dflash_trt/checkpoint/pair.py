"""A target and its drafter as checkpoints: location, configuration and tensors of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dflash_trt.bundle.manifest import digest
from dflash_trt.checkpoint.roles import parameters_of, role_of
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.checkpoint.tensors import Checkpoint, Outline
from dflash_trt.errors import BuildError
from dflash_trt.files.disk import own_file

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Source:
    """The directory of a checkpoint, and its hub repository and commit if it is a snapshot of one."""

    directory: Path
    repo: str | None = None
    revision: str | None = None


Config = TypeVar("Config", bound=TargetConfig | DrafterConfig)


@dataclass(frozen=True)
class Side(Generic[Config]):
    """One checkpoint of the pair. `folder` is the place of its weights inside the bundle."""

    source: Source
    config: Config
    checkpoint: Checkpoint | Outline
    folder: str

    def describe(self) -> dict[str, Any]:
        weights: dict[str, dict[str, int]] = {}
        for tensor in self.checkpoint.tensors.values():
            by_dtype = weights.setdefault(role_of(tensor.name), {})
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.nbytes
        return {
            "name": self.source.repo or self.source.directory.resolve().name,
            "revision": self.source.revision,
            "config_sha256": digest(self.config.path),
            "architecture": self.config.architecture,
            "num_hidden_layers": self.config.num_hidden_layers,
            "parameters": sum(
                parameters_of(t, self.checkpoint.quantization) for t in self.checkpoint.tensors.values()
            ),
            "weights": self.folder,
            "weight_bytes": {role: dict(sorted(weights[role].items())) for role in sorted(weights)},
        }


@dataclass(frozen=True)
class CheckpointPair:
    """A target, its drafter if it has one, and the drafter's own LM head, if it has one.

    `draft_tokens`: the token ids of that head's rows; None for all.
    """

    target: Side[TargetConfig]
    drafter: Side[DrafterConfig] | None
    head: Checkpoint | Outline | None = None
    draft_tokens: Sequence[int] | None = None

    @property
    def sides(self) -> dict[str, Side[TargetConfig] | Side[DrafterConfig]]:
        """The checkpoints by role: "target" and, if there is one, "drafter"."""
        return {"target": self.target} | ({"drafter": self.drafter} if self.drafter else {})

    @property
    def draft_config(self) -> DrafterConfig | None:
        return self.drafter.config if self.drafter else None


def tokenizer_files(target: Side[TargetConfig], names: Sequence[str] = TOKENIZER_FILES) -> dict[str, Path]:
    """The files of `names` that the target has, and their paths.

    Raises BuildError if the target has weights but no tokenizer.json.
    """
    directory = target.source.directory
    files = {name: own_file(directory, directory / name) for name in names if (directory / name).is_file()}
    if "tokenizer.json" not in files and isinstance(target.checkpoint, Checkpoint):
        raise BuildError(
            f"{directory}: no tokenizer.json; save the tokenizer in the fast (tokenizers) format there"
        )
    return files
