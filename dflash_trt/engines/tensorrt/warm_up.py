"""Passes at load, in the shapes that will come. So no request waits for a kernel's compilation or a capture."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from dflash_trt.engines.tensorrt.profiles import prefill_lengths

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress
    from dflash_trt.decoding.pair import Pair

_log = logging.getLogger(__name__)
# No further shape is begun after so many seconds (docs/tensorrt.md).
SECONDS = 60.0
STEP = "warm up"


def warm_up(pair: Pair, block_size: int, progress: Progress, *, times: int = 1) -> int:
    """Run passes of both models, the most frequent shapes first. Returns the number of shapes.

    times: how often a shape of verification or drafting runs. TensorRT-RTX compiles its kernels in the first pass, and
    captures a later one. All slots are clear then, as after opening.
    """
    begin = perf_counter()
    passes = list(_passes(pair, block_size, times))
    done = 0
    for run in passes:
        if perf_counter() - begin > SECONDS:
            break
        run()
        done += 1
        progress(STEP, done, len(passes))
    for slot in range(pair.slots):
        pair.clear(slot)
    pair.arrays.wait()
    if done < len(passes):
        progress(STEP, len(passes), len(passes))
    _log.info(
        "ran %d of %d shapes in %.1f s; the others are prepared when they come",
        *(done, len(passes), perf_counter() - begin),
    )
    return done


def _passes(pair: Pair, block_size: int, times: int) -> Iterator[Callable[[], object]]:
    for length in reversed(prefill_lengths(pair.prefill_chunk)):
        yield partial(pair.prefill, [0] * length, 0, 0, draft=True)
    # One request and a full batch are more frequent than what lies between; so are the lengths that a policy starts
    # with.
    batches = dict.fromkeys([1, pair.slots, *range(2, pair.slots)])
    lengths = dict.fromkeys([block_size, 1, *(2**i for i in range(1, 5)), *range(1, block_size)])
    for batch in batches:
        for length in (n for n in lengths if n <= block_size):
            yield partial(_repeated, pair.dummy_verify, batch, length, times)
            if length > 1:
                yield partial(_repeated, pair.dummy_draft, batch, length, times)


def _repeated(run: Callable[[int, int], object], batch: int, length: int, times: int) -> None:
    for _ in range(times):
        run(batch, length)
