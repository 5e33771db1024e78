"""TensorRT and TensorRT-RTX in a build: graphs as for ONNX Runtime, and plans compiled from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.bundle.manifest import cache_rows
from dflash_trt.bundle.workspace import Progress
from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.engines.base import BuildSettings
from dflash_trt.engines.device.sizes import aligned_rows
from dflash_trt.engines.graph_job import (
    GraphJob,
    cache_rows_by_window,
    export,
    graph_digests,
    graph_fields,
    graph_files,
)
from dflash_trt.engines.tensorrt.options import TensorRTOptions
from dflash_trt.engines.tensorrt.plans import FOLDER, Plans


@dataclass(kw_only=True)
class PlanJob(GraphJob):
    """Writes the graphs and, from them, one plan per graph and compute capability."""

    plans: Plans

    def write(
        self, work: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        files = super().write(work, manifest, files, progress)
        manifest["tensorrt"]["plans"], built = self.plans.build(work, self.models, manifest["key"], progress)
        return {name: entry for name, entry in files.items() if not name.startswith("weights/")} | built


def plan_job(engine: str, pair: CheckpointPair, settings: BuildSettings, progress: Progress) -> PlanJob:
    """The part of a flavour in a build. Raises BuildError for what is impossible."""
    moe = pair.target.config.moe
    capacity = cache_rows(settings.max_seq_len, settings.block_size)
    plans = Plans(
        engine,
        settings.options or TensorRTOptions(),
        settings.precision,
        roles=pair.sides,
        block_size=settings.block_size,
        capacity=capacity,
        formats=_formats(pair),
        expert_formats={"mxfp4"} if moe is not None and moe.quantization else (),
        recurrent=bool(pair.target.config.delta_layers),
    )
    # Beside a pass that filled a slot, other passes write a block there while it is idle (rounds.py).
    by_window = cache_rows_by_window(
        pair,
        plans.dialects,
        max_seq_len=settings.max_seq_len,
        block_size=settings.block_size,
        chunk=plans.limits.prefill_chunk + settings.block_size,
    )
    rows = {
        role: {window: aligned_rows(count) for window, count in counts.items()}
        for role, counts in by_window.items()
    }
    models = export(pair, plans.dialects, rows, settings.tree_width, progress)
    plans.compile_kernels(models)
    return PlanJob(
        manifest=graph_fields(pair, plans.dialects, models, rows) | {"tensorrt": plans.describe()},
        files=graph_files(pair),
        digests=graph_digests(models),
        link=True,  # plans contain the weights, so no copies are made for them
        keep=FOLDER,
        models=models,
        plans=plans,
    )


def _formats(pair: CheckpointPair) -> set[str]:
    checkpoints = [side.checkpoint for side in pair.sides.values()] + (
        [] if pair.head is None else [pair.head]
    )
    return {scheme for checkpoint in checkpoints for scheme in number_formats(checkpoint)}
