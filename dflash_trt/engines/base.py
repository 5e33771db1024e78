"""An engine as a build sees it: what it refuses, and its part of a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from dflash_trt.bundle.workspace import Progress, Workspace
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
from dflash_trt.formats.base import WeightLayout
from dflash_trt.formats.precision import Precision

# "copy": files of the bundle's own.  "link": hard links to the checkpoints' files.  "none": graphs only.
Weights = Literal["copy", "link", "none"]


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What is asked of a build. `max_seq_len` and `block_size` are in tokens. `options`: the engine's own, if any."""

    block_size: int
    max_seq_len: int
    weights: Weights
    precision: Precision
    options: Any = None


@dataclass(kw_only=True)
class BuildJob(ABC):
    """What an engine adds to a bundle.

    `manifest`: its fields. `files`: files that go into the bundle as they are, by their names there. `digests`: sha256
    of what it will write, by name; they go into the bundle's key. `link`: whether weights are hard-linked. `keep`: the
    folder of the work directory in which an interrupted build left something of use.
    """

    manifest: dict[str, Any]
    files: Mapping[str, Path]
    digests: Mapping[str, str] = field(default_factory=dict)
    link: bool
    keep: str = ""

    @abstractmethod
    def write(
        self, work: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        """Write the rest into `work`, which holds `files`. `manifest` has its key, and may be completed.

        Returns every file of the bundle as the manifest lists it: with its size and digest.
        """


class Engine(ABC):
    """An entry of the registry.

    `option`: the argument of `build` that takes this engine's own options. `weights_folder`: where checkpoints lie in
    its bundles. `weight_layout`: how it reads quantized layers.
    """

    name: str
    option: ClassVar[str] = ""
    weights_folder: ClassVar[str] = "weights/"
    weight_layout: ClassVar[WeightLayout] = "stored"

    @abstractmethod
    def check(self, precision: Precision | None, weights: Weights, options: Any) -> None:
        """Raise BuildError for what this engine cannot do, before anything is read."""

    def check_pair(self, target: TargetConfig, drafter: DrafterConfig) -> None:  # noqa: B027 - most take any
        """Raise CheckpointError for a pair that this engine does not take."""

    @abstractmethod
    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> BuildJob:
        """This engine's part of a build of `pair`. Raises BuildError for what is impossible."""
