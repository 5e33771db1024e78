"""How TensorRT-LLM lays a pair out in memory: its own constants."""

from dflash_trt.engines.base import GIB, MemoryTraits, PagedPool

# TensorRT-LLM 1.4: _DFLASH_BUDGET_ACTIVATION_RESERVE_BYTES and _SAFETY_FACTOR; the fraction is its default.
POOL = PagedPool(page=32, fraction=0.9, activation_bytes=6 * GIB, arena_safety=0.70)
# _DFLASH_BUDGET_RUNTIME_OVERHEAD_BYTES.
MEMORY = MemoryTraits(runtime_bytes=4 * GIB, pool=POOL)
