"""Resident memory of a server during a soak, and whether it grows once the prefix cache is full."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from statistics import median

FULL, MOST_GROWTH = 0.95, 1.03  # share of the cache's limit; memory of the last third over that of the first


class Memory:
    """Samples in MB by process, and the share of the prefix cache that is used.

    sizes: resident memory by process. metrics: the text of /metrics. kills: whether the engine is killed meanwhile, so
    that its memory begins anew.
    """

    def __init__(
        self, sizes: Callable[[], dict[str, float]], metrics: Callable[[], str], *, kills: bool
    ) -> None:
        self._sizes, self._metrics, self._kills = sizes, metrics, kills
        self.samples: list[dict[str, float]] = []

    async def watch(self, interval: float) -> None:
        """Take a sample every so many seconds, until cancelled."""
        while True:
            text = await asyncio.to_thread(self._metrics)
            kept, limit = (self._value(text, f"prefix_cache_{name}") for name in ("bytes", "limit_bytes"))
            self.samples.append({**self._sizes(), "cache": round(kept / limit, 3) if limit else 0.0})
            print(self.samples[-1], flush=True)
            await asyncio.sleep(interval)

    @staticmethod
    def _value(text: str, name: str) -> float:
        found = re.search(rf"^dflash_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def faults(self) -> list[str]:
        """The processes that have grown since the cache was full, and a cache that was never full long enough."""
        full = [sample for sample in self.samples if sample["cache"] >= FULL]
        if self._kills:
            return []
        third = len(full) // 3
        if third < 3:
            return [f"the prefix cache was full in {len(full)} samples only: let it run longer"]
        faults = []
        for name in full[0].keys() - {"cache"}:
            first, last = (median(s[name] for s in part) for part in (full[:third], full[-third:]))
            if last > MOST_GROWTH * first:
                faults.append(f"the memory of {name} grew from {first:.1f} to {last:.1f} MB")
        return faults
