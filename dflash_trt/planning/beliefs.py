"""Believed times of a bundle's passes: from a steps file beside it, or from the model of times.

The adaptive length starts with these times wherever its start-up measures no pass. Their scale matters little, because
it is corrected by the passes that were timed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_trt import hardware
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.checkpoint.schema import TargetConfig
from dflash_trt.engines.registry import engine_of
from dflash_trt.errors import DFlashError
from dflash_trt.models.configs import read_target_config
from dflash_trt.planning import times
from dflash_trt.planning.gpus import Gpu, gpus
from dflash_trt.planning.steps import DRAFTER, TARGET, Grid, read_steps
from dflash_trt.planning.work import Work

# Seconds of a pass over so many requests, with so many rows of each.
Belief = Callable[[int, int], float]
SIDES = (TARGET, DRAFTER)

_log = logging.getLogger(__name__)
_CPU: Mapping[str, float] = json.loads(Path(__file__).with_name("times.json").read_text())["cpu"]
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}


def beliefs(bundle: Bundle, context: int) -> dict[str, Belief]:
    """The time of a pass of "target" and of "drafter", behind `context` rows of cache.

    Empty where nothing is known: for a GPU that `plan --gpus` does not list, and for a target with recurrent layers.
    """
    return _measured(bundle, context) or _modelled(bundle, context)


def steps_file(bundle: Bundle) -> Path:
    """The place of a bundle's own steps file: beside the directory, because a bundle holds only what it lists."""
    return bundle.path.with_name(f"{bundle.path.name}.steps.json")


def _measured(bundle: Bundle, context: int) -> dict[str, Belief]:
    file = steps_file(bundle)
    if not file.is_file():
        return {}
    try:
        steps = read_steps(file)
        wrong = steps.differs_from(bundle)
    except DFlashError as error:
        wrong = str(error)
    if wrong:
        _log.warning("times of %s are not used: %s", file, wrong)
        return {}
    return {side: _within(steps.grids[side], context) for side in SIDES if side in steps.grids}


def _within(grid: Grid, context: int) -> Belief:
    """Times between the points of a grid. Outside, the nearest point counts."""

    def nearest(axis: tuple[int, ...], value: int) -> int:
        return min(max(value, axis[0]), axis[-1])

    def seconds(batch: int, rows: int) -> float:
        return grid(*(nearest(*each) for each in zip(grid.axes, (batch, rows, context), strict=True)))

    return seconds


def _modelled(bundle: Bundle, context: int) -> dict[str, Belief]:
    machine = _machine(bundle)
    config = bundle.path / "configs" / "target.json"
    if machine is None or not config.is_file():
        return {}
    gpu, constants = machine
    target = read_target_config(config.parent, config.name)
    if target.delta_layers:  # the model has no time of a state
        return {}

    def belief(work: Work) -> Belief:
        return lambda batch, rows: times.pass_seconds(
            work, gpu, constants, requests=batch, width=rows, context=context
        )

    return {side: belief(work_of_bundle(bundle.manifest, target, side, gpu)) for side in SIDES}


def _machine(bundle: Bundle) -> tuple[Gpu, times.Constants] | None:
    """The GPU of the table that runs the bundle, or this processor, and its constants. None for another GPU."""
    constants = times.built_in()
    if engine_of(bundle).container(bundle.manifest).gpus:
        names = [gpu["name"] for gpu in hardware.gpus()[:1]]
        known = [gpu for gpu in gpus().values() if any(map(gpu.is_named, names)) and gpu.dense_flops]
        return (known[0], constants) if known else None
    cores = hardware.cores() or 1
    processor = Gpu(
        name="cpu",
        product=hardware.processor_name(),
        sm=0,
        memory_bytes=0,
        bandwidth=_CPU["bandwidth"],
        dense_flops={"bf16": cores * _CPU["core_flops"]},
        gpus_per_node=1,
        sources={},
    )
    return processor, replace(
        constants, layer_seconds=_CPU["layer_seconds"], bandwidth_share=1.0, compute_share=1.0, tile=0.0
    )


def work_of_bundle(manifest: Mapping[str, Any], target: TargetConfig, side: str, gpu: Gpu) -> Work:
    """The work of a pass of a bundle's graph, from the bytes that its manifest lists.

    Tensors in floating point have the graph's precision. A tensor of 4 bits has two numbers in a byte.
    """
    width = _FLOATS[{"float": "F32", "float16": "F16", "bfloat16": "BF16"}[manifest["precision"][side]]]
    sizes, numbers = dict[str, float](), dict[str, float]()
    head = "head" if "head" in manifest["target"]["weight_bytes"] else "embedding"
    parts = [(side, role) for role in manifest[side]["weight_bytes"]]
    share = dict.fromkeys(parts, 1.0)
    if side == DRAFTER and not {"head", "embedding"} & {role for _, role in parts}:
        parts.append((TARGET, head))
        share[TARGET, head] = manifest.get("draft_vocab_size", target.vocab_size) / target.vocab_size
    for of, role in parts:
        packed = 2 if "4" in (manifest["quantization"].get(of) or "").partition("A")[0] else 1
        for dtype, size in manifest[of]["weight_bytes"][role].items():
            floats = size / _FLOATS[dtype] if dtype in _FLOATS else 0.0
            sizes[role] = sizes.get(role, 0.0) + (floats * width or size) * share[of, role]
            numbers[role] = numbers.get(role, 0.0) + (floats or size * packed) * share[of, role]
    unread = {"experts", *({"embedding"} if "head" in sizes else ())}
    moe = target.moe if side == TARGET else None
    experts = moe.num_experts if moe is not None and "experts" in sizes else 0
    rate = gpu.dense_flops["bf16"]
    return Work(
        layers=manifest[side]["num_hidden_layers"],
        dense_bytes=sum(size for role, size in sizes.items() if role not in unread),
        dense_operations=2 * sum(count for role, count in numbers.items() if role not in {*unread, "norm"}),
        dense_rate=rate,
        expert_bytes=sizes["experts"] / experts if experts else 0.0,
        expert_operations=2 * numbers["experts"] / experts if experts else 0.0,
        expert_rate=rate,
        experts=experts,
        experts_per_token=moe.experts_per_token if moe is not None and experts else 0,
        kv_bytes=manifest["cache_bytes_per_token"][side],
        window_bytes=0.0,
        window=0,
        hidden_bytes=0,
        gpus=1,
    )
