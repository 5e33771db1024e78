"""TensorRT and TensorRT-RTX in a build: graphs as for ONNX Runtime, and plans compiled of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_trt.bundle.manifest import cache_rows
from dflash_trt.bundle.workspace import Progress, Workspace
from dflash_trt.checkpoint.linears import number_formats
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.engines.base import BuildSettings, Engine, Weights
from dflash_trt.engines.graph_job import GraphJob, export, graph_digests, graph_fields, graph_files
from dflash_trt.engines.tensorrt.plans import FOLDER, Options, Plans
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import Precision


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


class TensorRTEntry(Engine):
    """Runs plans on one GPU."""

    option = "tensorrt"
    weight_layout = "int4_by_row"

    def __init__(self, name: str) -> None:
        self.name = name

    def check(self, precision: Precision | None, weights: Weights, options: Options | None) -> None:
        if weights != "copy":
            raise BuildError(
                f"--weights is {weights}, but --engine {self.name} builds plans, which hold the weights"
            )

    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> PlanJob:
        moe = pair.target.config.moe
        capacity = cache_rows(settings.max_seq_len, settings.block_size)
        plans = Plans(
            self.name,
            settings.options or Options(),
            settings.precision,
            block_size=settings.block_size,
            capacity=capacity,
            formats=_formats(pair),
            expert_formats={"mxfp4"} if moe is not None and moe.quantization else (),
        )
        models = export(pair, plans.dialects, capacity, progress)
        return PlanJob(
            manifest=graph_fields(pair, plans.dialects, models) | {"tensorrt": plans.describe()},
            files=graph_files(pair),
            digests=graph_digests(models),
            link=True,  # plans have the weights in them: for their sake none is copied
            keep=FOLDER,
            models=models,
            plans=plans,
        )


def entry(name: str) -> Engine:
    """The registry's entry of a flavour."""
    return TensorRTEntry(name)


def _formats(pair: CheckpointPair) -> set[str]:
    checkpoints = [side.checkpoint for side in pair.sides] + ([] if pair.head is None else [pair.head])
    return {scheme for checkpoint in checkpoints for scheme in number_formats(checkpoint)}
