"""The engine that a pair is built for where nobody named one."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from dflash_trt import hardware
from dflash_trt.checkpoint import gguf
from dflash_trt.checkpoint.catalogue import KnownPair, known_configs, known_pair
from dflash_trt.engines import registry
from dflash_trt.engines.base import EngineEntry, Weights
from dflash_trt.errors import BuildError, UsageError
from dflash_trt.formats.precision import Precision


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

    def possible(engine: EngineEntry) -> bool:
        with suppress(UsageError):
            engine.check(precision, weights, None)
            return True
        return False

    choice = registry.best_here(possible)
    pair = None if Path(target).is_dir() or weights == "none" else known_pair(target)
    if choice.engine == registry.DEFAULT and pair is not None and _is_fetched(pair):
        go_on = f"--engine {choice.engine} builds it for the CPU all the same"
        if choice.leaves_gpu_idle:
            raise BuildError(f"{target}: {choice.why}; {go_on}")
        if said := _too_large(pair, choice.engine, precision, max_seq_len, no_drafter):
            raise BuildError(f"{target}: {said}, and {choice.why}; {go_on}")
    print(f"{choice}; --engine NAME (in Python engine=NAME) chooses another", file=sys.stderr)
    return choice.engine


def _is_fetched(pair: KnownPair) -> bool:
    """Whether the weights come from the hub, not with a Python package."""
    return pair.target_repo is not None and pair.name not in gguf.PACKAGED


def _too_large(
    pair: KnownPair, engine: str, precision: Precision | None, max_seq_len: int | None, no_drafter: bool
) -> str:
    """Why one sequence of a pair does not fit into this machine's memory; empty if it does, or nobody knows."""
    from dflash_trt.building.limits import choose_block_size, choose_max_seq_len, choose_precision
    from dflash_trt.models.configs import read_drafter_config, read_target_config
    from dflash_trt.models.inventory import take_inventory
    from dflash_trt.planning.gpus import Gpu
    from dflash_trt.planning.memory import estimate_memory, gib
    from dflash_trt.planning.settings import Settings

    memory = hardware.memory_bytes()
    if memory is None:
        return ""
    folders = known_configs(pair.name)
    target = read_target_config(folders[0])
    drafter = None if no_drafter else read_drafter_config(folders[1], target)
    cpu = Gpu("this machine", "its memory", sm=0, memory_bytes=memory, gpus_per_node=1, sources={})
    settings = Settings(
        engine=engine,
        gpu=cpu,
        max_seq_len=choose_max_seq_len(max_seq_len, target, drafter),
        max_batch_size=1,
        block_size=choose_block_size(None, target, drafter),
        precision=choose_precision(precision, registry.find(engine), target, drafter, quantized=False),
    )
    estimate = estimate_memory(take_inventory(target, drafter), settings)
    if estimate.fits:
        return ""
    needed = gib(estimate.total_bytes)
    return f"needs {needed} GiB of memory for one sequence on the CPU, of which {gib(memory)} GiB are here"
