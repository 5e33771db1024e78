"""torch as an engine: the graphs as they are, on an NVIDIA GPU or on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_plugins.kernel_specs import ROUND_TARGET, TARGETS

from dflash_trt import hardware
from dflash_trt.engines.base import (
    PREFILL_CHUNK,
    Availability,
    BuildSettings,
    Container,
    EngineEntry,
    MemoryTraits,
    RunSettings,
    Weights,
)
from dflash_trt.extras import install

if TYPE_CHECKING:
    from dflash_trt.bundle.manifest import Bundle
    from dflash_trt.bundle.workspace import Progress, Workspace
    from dflash_trt.checkpoint.pair import CheckpointPair
    from dflash_trt.decoding.scheduler import Scheduler
    from dflash_trt.engines.graph_job import GraphJob
    from dflash_trt.formats.precision import Precision
    from dflash_trt.graph.dialect import Dialect


class TorchEntry(EngineEntry):
    """Runs graphs by torch."""

    modules = ("torch", "triton")
    needed = ("torch",)
    weight_layout = "int4_by_row"
    memory = MemoryTraits(
        host_bytes=70 << 20,
        expert_kernels={"mxfp4": frozenset(TARGETS)},
        idle_blocks=1,
        score_copies=(0, 2),
        widens=True,
        packed_kernels=ROUND_TARGET,
        shares_tables=True,
        states=2,  # a pass writes new ones beside those that it reads
        attention_kernels=frozenset(TARGETS),
    )

    def check(self, precision: Precision | None, weights: Weights, options: None) -> None:
        """Everything is possible: weights may be copied, linked or left out, in any dtype."""

    def job(
        self, pair: CheckpointPair, settings: BuildSettings, place: Workspace, progress: Progress
    ) -> GraphJob:
        """Graphs in BF16 where a GPU is, and else in FP32, unless the precision says otherwise."""
        from dflash_trt.bundle.manifest import cache_rows
        from dflash_trt.engines.graph_job import GraphJob
        from dflash_trt.graph.builder import COMPUTE
        from dflash_trt.graph.torch import Torch

        default = "bf16" if hardware.compute_capabilities() else "fp32"
        dialects: dict[str, Dialect] = {
            role: Torch(COMPUTE[settings.precision.compute(role, default)]) for role in pair.sides
        }
        # Beside a pass that filled a slot, other passes write a block there while it is idle.
        chunk = min(PREFILL_CHUNK, cache_rows(settings.max_seq_len, settings.block_size))
        chunk += settings.block_size
        return GraphJob.of(pair, settings, dialects, progress, chunk=chunk, link=settings.weights == "link")

    def open(self, bundle: Bundle, settings: RunSettings) -> Scheduler:
        from dflash_trt.decoding.scheduler import Scheduler
        from dflash_trt.engines.torch.opening import open_pair

        pair = open_pair(
            bundle,
            slots=settings.max_batch_size,
            prefill_chunk=settings.prefill_chunk,
            threads=settings.threads,
            progress=settings.progress,
        )
        return Scheduler(pair, settings.prefix_cache_bytes)

    def describe(self, bundle: Bundle) -> dict[str, Any]:
        """The dtypes beside the rows of its caches."""
        return super().describe(bundle) | {"precision": bundle.manifest["precision"]}

    def availability(self, missing: Sequence[str], capabilities: Sequence[int]) -> Availability:
        ready = not missing
        if self.lacking():
            return Availability(ready, run=False, note=f"to run: {self.installation()}")
        if not capabilities:
            return Availability(ready, ready, "on the CPU, for trying: no GPU is here")
        if problem := hardware.torch_problem():
            return Availability(ready, run=False, note=problem)
        torch = hardware.torch_here()
        assert torch is not None
        note = f"on {', '.join(torch.gpus)}, by torch {torch.version} for CUDA {torch.cuda}"
        return Availability(ready, ready, note)

    def serves(self, capability: int) -> bool:
        return True

    def threads(self, asked: int | None) -> int:
        """torch's, which are the process's: as its environment says, or as the latest bundle was opened."""
        import torch

        return torch.get_num_threads()

    def window_stride(self, head_dim: int) -> int:
        from dflash_trt.graph.torch import Torch

        return Torch.window_stride(head_dim)

    def installation(self, manifest: Mapping[str, Any] | None = None) -> str:
        return install(self.name)

    def container(self, manifest: Mapping[str, Any]) -> Container:
        return Container(extra=self.name)
