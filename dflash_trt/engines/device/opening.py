"""From two runners on a device to a pair that is ready: arrays, and passes of the sizes that will come."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from dflash_plugins.kernel_specs import Use, round_uses
from dflash_plugins.launch import TYPE_NAMES, Run

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.drafter import USUAL_CONTEXT
from dflash_trt.decoding.pair import Pair
from dflash_trt.engines.base import PREFILL_CHUNK
from dflash_trt.engines.device.arrays import DeviceArrays
from dflash_trt.engines.device.runner import DeviceRunner
from dflash_trt.engines.device.sizes import batch_sizes, pass_sizes, prefill_lengths
from dflash_trt.logs import warn_once

if TYPE_CHECKING:
    from dflash_trt.bundle.workspace import Progress

_log = logging.getLogger(__name__)
DEVICE = "cuda"
STEP = "warm up"


def chunk_of(bundle: Bundle, asked: int, most: int) -> int:
    """The most tokens of a prompt in one pass. A warning says where that is less than was asked for."""
    if asked > most and asked != PREFILL_CHUNK:
        warn_once(_log, f"{bundle.path}: prefill_chunk is {asked}, but its passes read at most {most} tokens")
    return min(asked, most)


def pair_of(
    bundle: Bundle,
    runners: Mapping[str, DeviceRunner],
    *,
    slots: int,
    prefill_chunk: int,
    kernels: Callable[[Sequence[Use]], Run | None],
) -> Pair:
    """The pair of a bundle's runners, by role. `kernels` gives what launches these between passes, if any."""
    manifest = bundle.manifest
    target, drafter = runners["target"], runners.get("drafter")
    vocab, block_size = manifest["vocab_size"], manifest["block_size"]
    dtype = TYPE_NAMES[runners[bundle.roles[-1]].dtypes["features"]]
    arrays = DeviceArrays(
        *(target, drafter),
        slots=slots,
        capacity=bundle.capacity,
        prefill_chunk=prefill_chunk,
        block_size=block_size,
        feature_size=bundle.feature_size,
        vocab_size=vocab,
        tree_width=manifest["tree_width"],
        run=kernels(round_uses(vocab, bundle.feature_size, dtype, block_size)),
    )
    return Pair(
        *(target, drafter, arrays),
        slots=slots,
        capacity=bundle.capacity,
        mask_token_id=manifest["mask_token_id"],
        vocab_size=vocab,
        prefill_chunk=prefill_chunk,
        trees=manifest["tree_width"] > 1,
    )


def warm_up(
    pair: Pair, block_size: int, progress: Progress, *, runs: int, seconds: float | None = None
) -> int:
    """Run passes of both models in every size that requests can bring. Returns the number of sizes.

    runs: of each size, of prompts only for the longest. seconds: after these, only sizes that come first are still run:
    decoding passes of one request, and the longest ones of several, which need the most memory and all kernels. All
    slots are clear then, as after opening.
    """
    begin = perf_counter()
    batches = reversed(batch_sizes(pair.slots))
    sizes = [(batch, length) for batch in batches for length in reversed(pass_sizes(block_size))]
    first = [size for size in sizes if size[0] == 1 or size[1] == block_size]
    passes = list(_passes(pair, first, runs))
    needed, others = len(passes), [size for size in sizes if size not in first]
    passes += _decoding(pair, others, runs)
    done = 0
    for run in passes:
        if seconds is not None and done >= needed and perf_counter() - begin > seconds:
            break
        run()
        done += 1
        progress(STEP, done, len(passes))
    for slot in range(pair.slots):
        pair.clear(slot)
    pair.arrays.wait()
    _log.info("ran passes of %d sizes of %d in %.1f s", done, len(passes), perf_counter() - begin)
    return done


def _passes(pair: Pair, sizes: Sequence[tuple[int, int]], runs: int) -> Iterator[Callable[[], object]]:
    """Prompts, and decoding passes of these sizes: sequences, and rows of each. The largest of both come first."""
    drafts = pair.drafter.present
    for length in reversed(prefill_lengths(pair.prefill_chunk)):
        prompt = partial(pair.prefill, [0] * length, 0, 0, draft=drafts)
        yield partial(_repeated, prompt, runs if length == pair.prefill_chunk else 1)
    yield from _decoding(pair, sizes, runs)


def _decoding(pair: Pair, sizes: Sequence[tuple[int, int]], runs: int) -> Iterator[Callable[[], object]]:
    for batch, length in sizes:
        yield partial(_round, pair, batch, partial(pair.dummy_verify, batch, length), runs)
        if length > 1 and pair.drafter.present:
            yield partial(_round, pair, batch, partial(pair.drafter.dummy_pass, batch, length), runs)


def _round(pair: Pair, batch: int, run: Callable[[], object], runs: int) -> None:
    """Run a decoding pass, unless caches lack memory for so many sequences: then requests cannot bring it either."""
    length = USUAL_CONTEXT + 2 * pair.arrays.most_nodes
    if all(pair.reserve(slot, length) for slot in range(batch)):
        _repeated(run, runs)


def _repeated(run: Callable[[], object], runs: int) -> None:
    for _ in range(runs):
        run()
