"""Engine, block size, candidates, longest sequence and precision of a build: as asked if the models allow it, or by
default.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt import hardware
from dflash_trt.building.progress import say
from dflash_trt.checkpoint import gguf
from dflash_trt.checkpoint.catalogue import KnownPair, known_configs, known_pair
from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.checkpoint.schema import PENDING_ROWS, DrafterConfig, TargetConfig
from dflash_trt.engines import registry
from dflash_trt.engines.base import Engine, Weights
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.formats import FORMATS
from dflash_trt.formats.floats import FP8
from dflash_trt.formats.integers import GROUP, INT8
from dflash_trt.formats.precision import Precision

if TYPE_CHECKING:
    from dflash_trt.planning.gpus import Gpu


def choose_engine(
    target: str,
    weights: Weights = "copy",
    precision: Precision | None = None,
    max_seq_len: int | None = None,
    *,
    no_drafter: bool = False,
) -> str:
    """What this machine runs best of the engines that take these arguments of `build`. A line says so.

    Raises BuildError for a known pair that is not on this machine, if it would be fetched for the CPU although there is
    a GPU, or although the memory is too small for it.
    """

    def possible(engine: Engine) -> bool:
        with suppress(UsageError):
            engine.check(precision, weights, None)
            return True
        return False

    choice = registry.best_here(possible)
    pair = None if Path(target).is_dir() or weights == "none" else known_pair(target)
    if pair is not None and pair.target_repo is not None and pair.name not in gguf.PACKAGED:
        go_on = f"--engine {choice.engine} builds it all the same"
        if choice.leaves_gpu_idle:
            raise BuildError(f"{target}: {choice.why}; {go_on}")
        if reason := _too_large(pair, choice.engine, precision, max_seq_len, no_drafter):
            raise BuildError(
                f"{target}: {reason} ({choice}); `dflash-trt plan` shows what takes it, and what other bits "
                f"(--precision) would; {go_on}"
            )
    say(f"{choice}; --engine NAME (in Python engine=NAME) chooses another")
    return choice.engine


def _too_large(
    pair: KnownPair, engine: str, precision: Precision | None, max_seq_len: int | None, no_drafter: bool
) -> str:
    """Why one sequence of a pair does not fit into the memory of this machine's first GPU, or into its own where it
    runs on the CPU. Empty if it does, or nobody knows.
    """
    from dflash_trt.models.configs import read_drafter_config, read_target_config
    from dflash_trt.models.inventory import take_inventory
    from dflash_trt.planning.estimate import gib
    from dflash_trt.planning.gpus import Gpu, gpu_here
    from dflash_trt.planning.memory import estimate_memory
    from dflash_trt.planning.weights import Settings

    if engine != registry.DEFAULT:
        gpu = gpu_here()
    elif (memory := hardware.memory_bytes()) is not None:
        gpu = Gpu("the CPU", "its memory", sm=0, memory_bytes=memory, gpus_per_node=1, sources={})
    else:
        gpu = None
    if gpu is None:
        return ""
    folders = known_configs(pair.name)
    target = read_target_config(folders[0])
    drafter = None if no_drafter else read_drafter_config(folders[1], target)
    settings = Settings(
        engine=engine,
        gpu=gpu,
        max_seq_len=choose_max_seq_len(max_seq_len, target, drafter),
        max_batch_size=1,
        block_size=choose_block_size(None, target, drafter),
        precision=choose_precision(
            precision, registry.find(engine), target, drafter, quantized=False, gpu=gpu
        ),
    )
    estimate = estimate_memory(take_inventory(target, drafter), settings)
    if estimate.fits:
        return ""
    needed, here = gib(estimate.total_bytes), gib(gpu.memory_bytes)
    return f"needs {needed} GiB of memory for one sequence on {gpu.name}, of which {here} GiB are here"


# The default of --max-seq-len: the models' own limit, but no more than this, because cache memory grows with it.
DEFAULT_MAX_SEQ_LEN = 8192
# From this size in float32 on, a drafter and its copy of the head are in INT8 by default. At 113 MB (SmolLM2-135M) a
# drafter's pass of 8 rows took 9.2 ms instead of 13.8. A head of a few MB lies in the processor's caches.
LARGE_HEAD_BYTES = 64 << 20
# Candidates of a drafter beside a target with such a head, on ONNX Runtime. SmolLM2-135M was at least as fast with
# them, and up to 1.1 times as fast. Beside a small target the host takes longer to make a tree than the tree saves.
TREE_WIDTH = 8
# The most candidates for a place. Trees of the published budgets, up to 128 nodes, use fewer.
_MOST_CANDIDATES = 64
# Tokens of a verification without a drafter: as many as most published drafters have, and the most that may be asked.
_COPIED, _MOST_COPIED = 16, 32


def choose_block_size(asked: int | None, target: TargetConfig, drafter: DrafterConfig | None) -> int:
    """Tokens of a verification, by default as the drafter was trained. Raises BuildError for more than that, and
    without a drafter for more than the target can take back.
    """
    if drafter is None:
        most = PENDING_ROWS if target.delta_layers else _MOST_COPIED
        if asked is not None and not 2 <= asked <= most:
            raise UsageError(f"--block-size is {asked}, expected 2..{most} without a drafter ({target.path})")
        return _COPIED if asked is None else asked
    if asked is None:
        return drafter.block_size
    if not 2 <= asked <= drafter.block_size:
        raise UsageError(
            f"--block-size is {asked}, expected 2..{drafter.block_size}: the drafter was trained for blocks of "
            f"{drafter.block_size} ({drafter.path})"
        )
    return asked


def choose_tree_width(
    asked: int | None, pair: CheckpointPair, precision: Precision | None, engine: Engine
) -> int:
    """Candidates for each place, by default several beside a large target in floats, on an engine that multiplies
    integers. Raises BuildError for more than the drafter has, and where target or engine verify no trees.
    """
    target, drafter = pair.target.config, pair.draft_config
    scheme = precision.scheme("target") if precision is not None else None
    formats = number_formats(pair.target.checkpoint) | ({scheme} if scheme is not None else set())
    if drafter is None:
        if asked not in (None, 1):
            raise UsageError(f"--tree-width is {asked}, but no drafter gives candidates: leave it out")
        return 1
    most = min(_MOST_CANDIDATES, drafter.vocab_size, drafter.most_candidates or drafter.vocab_size)
    integers = sorted(
        n for n in formats if engine.multiplies_integers and FORMATS[n].integer_bits is not None
    )
    if asked is None:
        pays = engine.multiplies_integers and not integers and _has_large_head(target)
        asked = min(TREE_WIDTH, most) if pays and not target.delta_layers else 1
    if not 1 <= asked <= most:
        raise UsageError(
            f"--tree-width is {asked}, expected 1..{most}: the most candidates that {drafter.path} allows for a place"
        )
    if asked > 1 and target.delta_layers:
        raise UsageError(
            f"--tree-width is {asked}, but {target.path} has layers that keep a state and verify chains only: "
            "leave it out"
        )
    if asked > 1 and integers:  # whose products round their inputs; a tree changes these in their last bits
        raise UsageError(
            f"--tree-width is {asked}, but the target is in {', '.join(integers)}: with trees, --engine {engine.name} "
            "would give other tokens than without drafts; leave it out"
        )
    return asked


def choose_precision(
    asked: Precision | None,
    engine: Engine,
    target: TargetConfig,
    drafter: DrafterConfig | None,
    *,
    quantized: bool,
    gpu: Gpu | None = None,
) -> Precision:
    """The precision of a build: as asked. By default, where the engine multiplies integers, a drafter beside a large
    head is in INT8 with its copy of the head, as no token depends on it. `quantized`: whether drafter or head have a
    number format of their own already. `gpu`: on which the engine may give a drafter that has no head a copy in FP8; it
    does if that takes at most a fiftieth of the memory.

    Raises UsageError for a precision of a drafter that there is not.
    """
    asked = asked or Precision()
    if drafter is not None:
        free = asked.drafter is None and asked.head is None and not quantized and not drafter.own_head
        in_groups = all(size % GROUP == 0 for size in (drafter.hidden_size, drafter.intermediate_size))
        if engine.multiplies_integers and free and in_groups and _has_large_head(target):
            return replace(asked, drafter=INT8.name, head=INT8.name)
        if free and gpu is not None and engine.fp8_head is not None and gpu.sm >= engine.fp8_head:
            small = 50 * target.vocab_size * target.hidden_size <= gpu.memory_bytes
            return replace(asked, head=FP8.name if small and _has_large_head(target) else None)
        return asked
    for role in ("drafter", "head"):
        if value := getattr(asked, role):
            raise UsageError(f"--precision has {role}={value}, but there is no drafter: leave it out")
    return asked


def _has_large_head(target: TargetConfig) -> bool:
    return 4 * target.vocab_size * target.hidden_size >= LARGE_HEAD_BYTES


def choose_max_seq_len(asked: int | None, target: TargetConfig, drafter: DrafterConfig | None) -> int:
    """Tokens of a prompt and its output together. Raises BuildError for more than the models take."""
    limits = {"target": target.max_position_embeddings}
    if drafter is not None:
        limits["drafter"] = drafter.max_position_embeddings
    limit = min(limits.values())
    if asked is None:
        return min(limit, DEFAULT_MAX_SEQ_LEN)
    if not 2 <= asked <= limit:
        both = " and ".join(f"{most} in the {role}" for role, most in limits.items())
        raise UsageError(f"--max-seq-len is {asked}, expected 2..{limit}: max_position_embeddings is {both}")
    return asked


def narrow_drafter(asked: int | None, drafter: DrafterConfig | None, engine: Engine) -> DrafterConfig | None:
    """The drafter with layers that see at most `asked` tokens. No token of an answer depends on it, only acceptance.

    Raises UsageError for a window that is no narrower than the trained ones, or smaller than a block, and where engine
    or drafter take none.
    """
    if asked is None:
        return drafter
    if drafter is None:
        raise UsageError(f"--drafter-window is {asked}, but there is no drafter: leave it out")
    if engine.unchanged:
        raise UsageError(
            f"--drafter-window is {asked}, but --engine {engine.name} reads the drafter's config.json itself: "
            "leave it out"
        )
    if not drafter.masks:
        raise UsageError(
            f"--drafter-window is {asked}, but {drafter.path} drafts one token after another: leave it out"
        )
    most = max(layer.window or drafter.max_position_embeddings for layer in drafter.layers)
    if not drafter.block_size <= asked < most:
        raise UsageError(
            f"--drafter-window is {asked}, expected {drafter.block_size}..{most - 1}: at least a block, and less than "
            f"the drafter was trained for ({drafter.path})"
        )
    layers = tuple(replace(layer, window=min(asked, layer.window or asked)) for layer in drafter.layers)
    return replace(drafter, layers=layers)
