"""An entry of the registry: what the package knows of an engine, how it builds and how it opens a bundle.

What runs passes is a `PassEngine` (decoding/arrays.py), or a driver. An entry is a light module. Its methods import
what they need when they are called, so that every engine can be listed and described where none of its packages is
installed.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dflash_trt import hardware
from dflash_trt.extras import install

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
GIB = 1 << 30
PREFILL_CHUNK = 512  # most tokens of a prompt in one pass, by default
# Tags of nvcr.io/nvidia/tritonserver. Containers before 26.07 have defects that clients can
# use (docs/serving.md, "Versions"). Checked on 2026-11-25 against triton-inference-server/server at e1db8a6, of
# 2026-08-19: README.md names the first, and the second is the newest of its kind in docs/introduction/compatibility.md,
# which gives its TensorRT-LLM.
TRITON_IMAGE, TRITON_TRTLLM_IMAGE, TRITON_TRTLLM_VERSION = "26.07-py3", "26.07-trtllm-python-py3", "1.2.1"


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
    threads: int | None
    progress: Progress


@dataclass(frozen=True)
class Availability:
    """Whether this machine can build for an engine and run it. `note`: for which GPUs, and what is missing."""

    build: bool
    run: bool
    note: str


@dataclass(frozen=True)
class Container:
    """Where Triton serves a bundle: the tag of NVIDIA's image, and what pip has to add to it.

    extra: of this package. note: what a user should know before choosing it.
    """

    tag: str = TRITON_IMAGE
    gpus: bool = True
    extra: str = ""
    packages: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PagedPool:
    """A pool of cache pages of `page` tokens that takes the share `fraction` of free memory, at most.

    `activation_bytes`: the least that is set aside for activations. `arena_safety`: the share of free memory that a
    dense buffer beside the pool may take.
    """

    page: int
    fraction: float
    activation_bytes: int
    arena_safety: float


@dataclass(frozen=True, kw_only=True)
class MemoryTraits:
    """How an engine lays a pair out in a GPU's memory.

    `compute`: the dtype of weights and caches for which no precision is given. `runtime_bytes`: context, libraries and
    workspace on a GPU, as an allowance; 0 if it runs on CPUs only. `host_bytes`: the same on a CPU.
    `prompt_rows`: the most rows of a pass over a prompt. `scratch_bytes`: what both plans need beside the
    estimate from shapes; an engine that has it computes every expert for every row. `expert_kernels`: formats of
    experts that need no such memory, and the compute capabilities with kernels of this project for them.
    `row_unit`: the cache rows of a sequence are a multiple of it. `idle_blocks`: blocks that layers with a window keep
    beside a pass, as other passes write there while the slot is idle.
    `keeps_queries`: whether the queries of all layers of a pass have memory at once. `states`: how often a sequence's
    recurrent states are held.
    `waiting_tokens`: the tokens of a sequence whose features may wait for the drafter, if it keeps all rows.
    `host_share`: what a CPU makes of weights in integers as it loads them, as a share of their bytes.
    `score_copies`: how often attention without and with sinks holds the scores of a pass in float32, with a column for
    each cache row.
    `widens`: whether weights in few bits have the compute dtype on the GPU, except where kernels multiply them.
    `packed_kernels`: the lowest compute capability with kernels for layers in any format, where the compute dtype is
    not FP32.
    `shares_tables`: whether the drafter reads the target's own embedding and head, instead of copies.
    `attention_kernels`: compute capabilities for which attention has kernels of this project, and needs neither masks
    nor these queries.
    `pool`: the pages of an engine with several GPUs and a scheduler of its own; None for dense caches on one GPU.
    """

    compute: str = "bf16"
    runtime_bytes: int = GIB
    host_bytes: int = 0
    prompt_rows: int = PREFILL_CHUNK
    scratch_bytes: int = 0
    expert_kernels: Mapping[str, frozenset[int]] = field(default_factory=dict)
    keeps_queries: bool = False
    waiting_tokens: int = 0
    host_share: float = 0.0
    score_copies: tuple[int, int] = (0, 0)
    widens: bool = False
    packed_kernels: int | None = None
    shares_tables: bool = False
    states: int = 1
    row_unit: int = 1
    idle_blocks: int = 0
    attention_kernels: frozenset[int] = frozenset()
    pool: PagedPool | None = None

    def has_expert_kernels(self, quantization: str | None, capability: int) -> bool:
        """Whether kernels read the experts of this format as they are stored, and only those that are chosen."""
        return quantization is not None and capability in self.expert_kernels.get(quantization, ())

    @property
    def several_gpus(self) -> bool:
        """Whether a pair can be spread over GPUs."""
        return self.pool is not None


@dataclass(frozen=True)
class EngineOptions:
    """The build options of one engine, or of several, as a dataclass.

    A field whose metadata is an `option` is an option of the command line. `title`: of their group in the help text.
    `batch`: what --max-batch-size is by default.
    """

    title: ClassVar[str]
    batch: ClassVar[str]


class EngineEntry(ABC):
    """An entry of the registry: all that the package knows of one engine.

    `options`: its own options of a build. `weights_folder`: where checkpoints lie in its bundles.
    `tokenizer_folder`: where the tokenizer lies in them. `weight_layout`: how it reads quantized layers. `modules`:
    Python modules that it can use, which `doctor` shows. `needed`: those without which it opens no bundle.
    `memory`: its layout, for `plan`. `draft_vocabulary`: whether a drafter may have fewer tokens than its target.
    `own_loop`: whether it runs its passes by itself, and not as this package asks. `equal_rows`: whether a row has
    the same bits in every pass without trees, so that drafts change no token.
    """

    options: ClassVar[type[EngineOptions] | None] = None
    weights_folder: ClassVar[str] = "weights/"
    tokenizer_folder: ClassVar[str] = ""
    weight_layout: ClassVar[WeightLayout] = "stored"
    draft_vocabulary: ClassVar[bool] = True
    own_loop: ClassVar[bool] = False
    equal_rows: ClassVar[bool] = False
    modules: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    memory: MemoryTraits

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def check(self, precision: Precision | None, weights: Weights, options: Any) -> None:
        """Raise BuildError for anything that this engine cannot do, before any file is read."""

    def read_target(self, directory: Path) -> TargetConfig:
        """A target's configuration, as this engine needs it. Raises CheckpointError."""
        from dflash_trt.models.configs import read_target_config

        return read_target_config(directory)

    def check_pair(self, target: TargetConfig, drafter: DrafterConfig | None) -> None:  # noqa: B027 - most take any
        """Raise CheckpointError for a pair, or a target without a drafter, that this engine does not support."""

    def refuses_published(self, drafter: PublishedDrafter, form: TargetForm | None) -> str:
        """Why this engine does not take a published drafter, or this form of its target; empty if it does."""
        return ""

    def choose_precision(
        self, asked: Precision, target: TargetConfig, drafter: DrafterConfig, *, quantized: bool
    ) -> Precision:
        """The precision of a build of a pair: what was asked, and the engine's own choice for the rest.

        `quantized`: whether the drafter or the target's head has a number format of its own already.
        """
        return asked

    def default_tree_width(self, target: TargetConfig, formats: Collection[str]) -> int:
        """The candidates of a build without `--tree-width`. `formats`: number formats of the target's layers."""
        return 1

    def check_trees(self, width: int, formats: Collection[str]) -> None:  # noqa: B027 - most verify any
        """Raise BuildError if this engine verifies no trees with a target in these number formats."""

    @abstractmethod
    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> BuildJob:
        """This engine's part of a build of `pair`. Raises BuildError if it is impossible."""

    def tokenizer(self, bundle: Bundle) -> Tokenizer:
        """The tokenizer of a bundle of this engine. Raises CheckpointError."""
        from dflash_trt.text.tokenizer import Tokenizer

        prefix = f"{self.tokenizer_folder}/" if self.tokenizer_folder else ""
        files = {name.removeprefix(prefix) for name in bundle.manifest["files"] if name.startswith(prefix)}
        return Tokenizer(bundle.path / self.tokenizer_folder, files)

    @abstractmethod
    def open(self, bundle: Bundle, settings: RunSettings) -> DecodingLoop:
        """Load a bundle of this engine. Raises DFlashError where this machine cannot run it."""

    def describe(self, bundle: Bundle) -> dict[str, Any]:
        """The lines of `inspect` for a bundle of this engine, beside those of every bundle."""
        kinds = [(role, kind) for role in bundle.roles for kind in bundle.cache_kinds(role)]
        whole = [kind.rows for _, kind in kinds if kind.window is None]
        windows = {f"{role}_rows_of_window_{kind.window}": kind.rows for role, kind in kinds if kind.window}
        return {"cache_rows": max(whole, default=bundle.capacity), **windows}

    @abstractmethod
    def availability(self, missing: Sequence[str], capabilities: Sequence[int]) -> Availability:
        """Whether this machine can build and run.

        `missing`: packages of the core that are not there. `capabilities`: compute capabilities of the GPUs here, as
        120 for 12.0.
        """

    def lacking(self) -> list[str]:
        """The modules that opening a bundle needs and that are not installed."""
        return [name for name in self.needed if importlib.util.find_spec(name) is None]

    def installation(self, manifest: Mapping[str, Any] | None = None) -> str:
        """The command that installs what opening a bundle needs: the one with this manifest, or any."""
        return install(*(f":{name}" for name in self.needed))

    def serves(self, capability: int) -> bool:
        """Whether it runs on GPUs of this compute capability."""
        return False

    def refusal(self, capability: int, inventory: Inventory, formats: Iterable[str]) -> str | None:
        """The reason if a build for GPUs of this compute capability is refused. `formats`: those of the weights."""
        return None

    def memory_settings(self, inventory: Inventory, options: Any) -> dict[str, Any]:
        """Fields of planning's `Settings` that follow from this engine's own options.

        Raises BuildError for a pair that it cannot run so.
        """
        return {}

    def threads(self, asked: int | None) -> int | None:
        """The threads of passes on a CPU, of a bundle that was opened with so many."""
        return asked or hardware.cores()

    def window_stride(self, head_dim: int) -> int | None:
        """How many rows layers with a window drop at once (`Dialect.window_stride`). None: they keep all rows."""
        return None

    def container(self, manifest: Mapping[str, Any]) -> Container:
        """The container that serves a bundle of this engine. Raises DFlashError where none is known."""
        return Container()


def option(flag: str, *, least: int | None = None, **arguments: Any) -> dict[str, Any]:
    """Metadata of a field of an engine's options: how the command line takes it.

    `least`: the value is an integer, and at least this. `arguments`: of argparse's add_argument.
    """
    return {"flag": flag, "least": least, "arguments": arguments}
