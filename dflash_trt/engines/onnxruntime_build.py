"""ONNX Runtime in a build: graphs with cache rows fixed at run time, computed in float32."""

from __future__ import annotations

from dflash_trt.bundle.workspace import Progress, Workspace
from dflash_trt.checkpoint.pair import CheckpointPair
from dflash_trt.engines.base import BuildSettings, Engine, Weights
from dflash_trt.engines.graph_job import GraphJob, export, graph_digests, graph_fields, graph_files
from dflash_trt.errors import BuildError
from dflash_trt.formats.precision import Precision
from dflash_trt.graph.dialect import Dialect
from dflash_trt.graph.onnxruntime import OnnxRuntime


class OnnxRuntimeEntry(Engine):
    """Runs graphs on the CPU."""

    name = OnnxRuntime.name
    weight_layout = "blocks"

    def check(self, precision: Precision | None, weights: Weights, options: None) -> None:
        for role in ("target", "drafter"):
            if precision is not None and (compute := precision.compute(role, "fp32")) != "fp32":
                raise BuildError(
                    f"--precision is {role}={compute}, but --engine {self.name} computes in fp32"
                )

    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> GraphJob:
        dialects: dict[str, Dialect] = {"target": OnnxRuntime(), "drafter": OnnxRuntime()}
        models = export(pair, dialects, "C", progress)
        return GraphJob(
            manifest=graph_fields(pair, dialects, models),
            files=graph_files(pair),
            digests=graph_digests(models),
            link=settings.weights == "link",
            models=models,
        )


def entry(name: str) -> Engine:
    """The registry's entry."""
    return OnnxRuntimeEntry()
