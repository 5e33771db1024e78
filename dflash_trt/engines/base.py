"""What the package knows of an engine: a record of data, and the functions that check, build, open and describe.

What runs passes is a `Runner` (decoding/arrays.py), or a driver. The module of an engine is light. Its functions
import what they need when they are called, so that every engine can be listed and described where none of its packages
is installed.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.catalogue import PublishedDrafter, TargetForm
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.checkpoint.schema import DrafterConfig, TargetConfig
    from dflash_trt.decoding.loop import DecodingLoop
    from dflash_trt.formats.base import WeightLayout
    from dflash_trt.formats.precision import Precision
    from dflash_trt.models.inventory import Inventory
    from dflash_trt.text.tokenizer import Tokenizer

# "copy": the bundle's own files. "link": hard links to the checkpoints' files. "none": graphs only.
Weights = Literal["copy", "link", "none"]
PREFILL_CHUNK = 512  # most tokens of a prompt in one pass, by default
PROMPT_DELAY = 0.2  # seconds of a step for prompts


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The settings of a build. `max_seq_len` and `block_size` are in tokens. `options`: the engine's own, if any.

    `tree_width`: the candidates that the drafter gives for each place. `exact`: whether the bundle is opened in exact
    mode by default.
    """

    block_size: int
    tree_width: int = 1
    max_seq_len: int
    weights: Weights
    precision: Precision
    options: Any = None
    exact: bool = False


@dataclass(kw_only=True)
class BuildJob(ABC):
    """An engine's part of a bundle.

    manifest: its fields of the manifest.
    files: files that go into the bundle unchanged, by their names there.
    digests: sha256 of the files that it will write, by name. They become part of the bundle's key.
    link: whether weights are hard-linked.
    """

    manifest: dict[str, Any]
    files: Mapping[str, Path]
    digests: Mapping[str, str] = field(default_factory=dict)
    link: bool

    @abstractmethod
    def write(
        self, work: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        """Write the other files into `work`, which holds `files`. `manifest` has its key, and may be completed.

        Returns every file of the bundle as the manifest lists it: with its size and digest.
        """


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The limits that a bundle is opened with. `LLM` describes the fields. `progress` shows what takes long."""

    max_batch_size: int
    prefill_chunk: int
    prefix_cache_bytes: int
    prompt_delay: float
    cache_tokens: int | None
    threads: int | None
    progress: Progress


@dataclass(frozen=True)
class Availability:
    """Whether this machine can build for an engine and run it. `note`: for which GPUs, and what is missing."""

    build: bool
    run: bool
    note: str


@dataclass(frozen=True)
class EngineOptions:
    """The build options of one engine, or of several, as a dataclass, whose annotations declare the command line's.

    `title`: of their group in the help text. `batch`: what --max-batch-size is by default, of an engine that takes it.
    """

    title: ClassVar[str]
    batch: ClassVar[str] = ""


def _read_pair(target: Path, drafter: Path | None) -> tuple[TargetConfig, DrafterConfig | None]:
    from dflash_trt.models.configs import read_pair

    return read_pair(target, drafter)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine.

    check: raises UsageError for a precision, a treatment of weights or options that it cannot have, before any file is
        read.
    build: its part of a build of a pair. Raises BuildError if that is impossible.
    open: loads a bundle. Raises DFlashError where this machine cannot run it.
    describe: the lines of `inspect` for a bundle, beside those of every bundle.
    available: whether it builds and runs where GPUs of these compute capabilities are (120 is 12.0).

    modules: Python modules that it can use, which `doctor` shows. needed: those without which it opens no bundle.
    options: its own options of a build. capabilities: the GPUs that it is chosen for; None: all.
    fp8_head: the lowest compute capability at which a drafter multiplies a copy of the head in FP8 by default; None: it
        does at none.
    weight_layout: how it reads quantized layers. unchanged: whether it reads checkpoints as they are, each in a folder
        of its bundle.
    own_loop: whether it runs its passes by itself, and not as this package asks. equal_rows: whether a row has the same
        bits in every pass without trees, so that drafts change no token.

    read_pair: the configurations of a target and its drafter. Raises CheckpointError for a pair that it does not take.
    refuses_published: why it does not take a published drafter, or this form of its target; empty if it does.
    refuses_gpu: why a build for GPUs of a compute capability is refused, for weights in these formats; empty if it is
        not.
    memory_settings: fields of planning's `Settings` that follow from its options. Raises BuildError for a pair that it
        cannot run so.
    """

    name: str
    check: Callable[[Precision | None, Weights, Any], None]
    build: Callable[[CheckpointPair, BuildSettings, Workspace, Progress], BuildJob]
    open: Callable[[Bundle, RunSettings], DecodingLoop]
    describe: Callable[[Bundle], dict[str, Any]]
    available: Callable[[Sequence[int]], Availability]
    modules: tuple[str, ...]
    needed: tuple[str, ...]
    options: type[EngineOptions] | None = None
    capabilities: Collection[int] | None = ()
    fp8_head: int | None = None
    weight_layout: WeightLayout = "stored"
    unchanged: bool = False
    own_loop: bool = False
    equal_rows: bool = False
    read_pair: Callable[[Path, Path | None], tuple[TargetConfig, DrafterConfig | None]] = _read_pair
    refuses_published: Callable[[PublishedDrafter, TargetForm | None], str] = lambda drafter, form: ""
    refuses_gpu: Callable[[int, Inventory, Iterable[str]], str] = lambda capability, inventory, formats: ""
    memory_settings: Callable[[Inventory, Any], dict[str, Any]] = lambda inventory, options: {}

    @property
    def multiplies_integers(self) -> bool:
        """Whether products of weights in integers round their inputs to integers too."""
        return self.weight_layout == "blocks"

    def folder(self, role: str) -> str:
        """Where the weights of a model lie in a bundle."""
        return role if self.unchanged else f"weights/{role}"

    def tokenizer(self, bundle: Bundle) -> Tokenizer:
        """The tokenizer of a bundle of this engine. Raises CheckpointError."""
        from dflash_trt.text.tokenizer import Tokenizer

        prefix = "target/" if self.unchanged else ""
        files = {name.removeprefix(prefix) for name in bundle.manifest["files"] if name.startswith(prefix)}
        return Tokenizer(bundle.path / prefix, files)

    def lacking(self) -> list[str]:
        """The modules that opening a bundle needs and that are not installed."""
        return [name for name in self.needed if importlib.util.find_spec(name) is None]

    def serves(self, capability: int) -> bool:
        """Whether it runs on GPUs of this compute capability."""
        return self.capabilities is None or capability in self.capabilities


def describe_caches(bundle: Bundle) -> dict[str, int]:
    """The cache rows of a sequence, and those in layers with a window, by role and window."""
    kinds = [(role, kind) for role in bundle.roles for kind in bundle.cache_kinds(role)]
    whole = [kind.rows for _, kind in kinds if kind.window is None]
    windows = {f"{role}_rows_of_window_{kind.window}": kind.rows for role, kind in kinds if kind.window}
    return {"cache_rows": max(whole, default=bundle.capacity), **windows}
