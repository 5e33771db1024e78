"""An `AsyncLLM` within an event loop, for tests: nothing may be left of it at the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_trt import AsyncLLM, SamplingParams
from tests.doubles.bundles import prompt

LONG = SamplingParams(max_tokens=200, ignore_eos=True)


# Prompts with common beginnings, greedy and sampled.
ASKED = [
    (prompt(30, 1)[: 10 + i] + prompt(5 * (i % 3), i), SamplingParams(max_tokens=n, temperature=t, seed=i))
    for i, (n, t) in enumerate([(24, 0.0), (40, 0.9), (1, 0.0), (60, 0.0), (33, 1.2), (7, 0.0)])
]


def serve(bundle: Path, body: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run `body` and close. Afterwards no stream, slot or task may be left."""

    async def main() -> None:
        options.setdefault("max_batch_size", 3)
        async with AsyncLLM(bundle, threads=1, prefill_chunk=16, **options) as llm:
            await body(llm)
        scheduler = llm.runtime.scheduler
        assert (llm.in_flight, scheduler.idle, llm._arrivals) == (0, True, [])
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not llm._thread.is_alive()

    asyncio.run(main())


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.001)


@contextmanager
def held(llm: AsyncLLM) -> Iterator[None]:
    """Within the block the engine waits before it reads a prompt, so no request ends."""
    go_on, prefill = threading.Event(), llm.runtime.pair.prefill

    def waits(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(600)
        return prefill(*arguments, **options)

    llm.runtime.pair.prefill = waits
    try:
        yield
    finally:
        go_on.set()
