"""The setting that a plan is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_trt.engines import registry
from dflash_trt.engines.base import MemoryTraits
from dflash_trt.formats.precision import Precision
from dflash_trt.planning.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The setting to plan for.

    cache: precision of the caches; by default the compute dtype.
    drafter_attention: for TensorRT-LLM. VANILLA and FA4 keep the drafter's context in a dense arena, TRTLLM keeps it
        in pages of the KV pool.
    max_num_tokens: tokens of one pass; by default the engine's.
    """

    engine: str
    gpu: Gpu
    max_seq_len: int
    max_batch_size: int
    block_size: int
    tensor_parallel: int = 1
    precision: Precision = field(default_factory=Precision)
    cache: str | None = None
    drafter_attention: str = "VANILLA"
    max_num_tokens: int | None = None

    def compute(self, side: str) -> str:
        """The compute dtype of "target" or "drafter"."""
        return self.precision.compute(side, self.traits.compute)

    @property
    def traits(self) -> MemoryTraits:
        """How the engine uses memory. Raises BuildError where there is no such engine."""
        return registry.find(self.engine).memory

    @property
    def arena(self) -> bool:
        """Whether the drafter's context has its own dense buffer."""
        return self.traits.pool is not None and self.drafter_attention != "TRTLLM"
