"""Time the passes of a bundle by rows, context and batch, for `plan --steps` (dflash_trt/planning/steps.py)."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import mean, median
from time import perf_counter
from typing import Any

from dflash_trt import hardware
from dflash_trt.bundle.workspace import Progress, silent
from dflash_trt.decoding.length.policy import FixedLength
from dflash_trt.decoding.pair import Pair
from dflash_trt.decoding.params import SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.scheduler import Scheduler
from dflash_trt.engines.registry import find
from dflash_trt.planning.steps import DRAFTER, FORMAT, HOST, ROUND, TARGET, VERSION
from dflash_trt.reports.environment import versions_of
from dflash_trt.runtime import Runtime

_CONTEXTS = (128, 512, 2048)
# Each pass is timed at least so many times, and more while there is time.
_LEAST, _MOST, _SECONDS = 3, 15, 20.0
# Rounds whose host code is timed, and the tokens of their prompts.
_ROUNDS, _PROMPT = 8, 48


def measure_steps(
    runtime: Runtime, prompts: Sequence[list[int]], batch: int, progress: Progress = silent
) -> dict[str, Any]:
    """The content of a steps file, for batches of 1 to `batch` requests. Overwrites the rows of all slots.

    An engine with a scheduler of its own is timed by whole rounds of requests.
    """
    batches = _powers(1, batch)
    rows: dict[str, Any]
    if isinstance(runtime.pair, Pair) and isinstance(runtime.scheduler, Scheduler):
        lengths = _powers(1, runtime.block_size)
        room = runtime.pair.capacity - 2 * runtime.block_size - 1
        contexts = [context for context in _CONTEXTS if context <= room] or [room]
        with runtime.scheduler.whole():
            runtime.scheduler.slots.overwritten()
            passes = PassTimes(runtime.pair, batches, lengths, contexts)
            begin = perf_counter()
            for turn in range(_MOST):
                if turn >= _LEAST and perf_counter() - begin > _SECONDS:
                    break
                passes.turn(f"turn {turn + 1} of up to {_MOST}", progress)
            for slot in range(batch):  # the numbers of these passes may not be finite
                runtime.pair.clear(slot)
        ends = (1, batch), (1, runtime.block_size)
        rows = {"passes": pass_rows(passes.found), HOST: list(host_times(runtime, prompts, *ends))}
    else:
        rows = {"passes": list(_rounds(runtime, prompts, batches, progress)), HOST: []}
    return document(runtime, rows)


def document(runtime: Runtime, rows: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a steps file with these `passes` and `host`."""
    manifest = runtime.bundle.manifest
    versions = versions_of(("dflash_trt", *find(manifest["engine"]).modules))
    return {
        "format": FORMAT,
        "version": VERSION,
        "machine": {"processor": hardware.processor(), "gpus": [gpu["name"] for gpu in hardware.gpus()]},
        "versions": {"python": platform.python_version(), **{n: v for n, v in versions.items() if v}},
        "bundle": {
            "name": runtime.bundle.path.name,
            "engine": manifest["engine"],
            "precision": manifest["precision"],
            "quantization": manifest.get("quantization", {}),
            "target": {key: manifest["target"][key] for key in ("name", "config_sha256")},
            "drafter": {key: manifest["drafter"][key] for key in ("name", "config_sha256")},
            "block_size": runtime.block_size,
            "max_seq_len": runtime.max_seq_len,
            "gpus": _gpus(manifest),
        },
        **rows,
    }


def _gpus(manifest: Any) -> int:
    """The GPUs that share the model."""
    for choice in (manifest.get("tensorrt_llm") or {}).get("choices", ()):
        if choice["name"] == "tensor_parallel_size":
            return int(choice["value"])
    return 1


def _powers(first: int, last: int) -> list[int]:
    """Powers of two from `first` on, and `last`."""
    return sorted({*(1 << n for n in range(last.bit_length()) if first <= 1 << n < last), last})


class PassTimes:
    """Times of a pair's passes. The turns go over all of them, so that a slow moment affects all.

    A pass of another size than the one before may copy caches or make buffers. So each pass runs twice, and the
    second one is timed.
    """

    def __init__(
        self, pair: Pair, batches: Sequence[int], lengths: Sequence[int], contexts: Sequence[int]
    ) -> None:
        self._pair, self._settings = pair, list(product(batches, contexts, lengths))
        self._longest = pair.capacity - 2 * lengths[-1] - 1
        self.found: dict[tuple[str, int, int, int], list[float]] = {}  # by kind, batch, rows and context

    def turn(self, step: str = "", progress: Progress = silent) -> None:
        """Time every pass once."""
        pair, found = self._pair, self.found
        for rehearse in (pair.rehearse_draft, pair.rehearse_verify):
            rehearse(1, 2, self._longest)  # ONNX Runtime's caches of single slots lie apart from then on
        for number, (batch, context, length) in enumerate(self._settings, 1):
            for timed in (False, True):
                # As in a round: a drafter's pass, then the target's.
                for kind, rehearse in ((DRAFTER, pair.rehearse_draft), (TARGET, pair.rehearse_verify)):
                    if kind == DRAFTER and length == 1:
                        continue
                    seconds = _timed(rehearse, batch, length, context)
                    if timed:
                        found.setdefault((kind, batch, length, context), []).append(seconds)
            progress(step, number, len(self._settings))


def pass_rows(found: Mapping[tuple[str, int, int, int], Sequence[float]]) -> list[dict[str, Any]]:
    """The `passes` of a steps file: medians of the times that each pass took."""
    return [
        {"pass": kind, "batch": b, "rows": n, "context": c, "seconds": _rounded(median(times))}
        for (kind, b, n, c), times in sorted(found.items())
    ]


def _timed(rehearse: Callable[[int, int, int], None], batch: int, length: int, context: int) -> float:
    begin = perf_counter()
    rehearse(batch, length, context)
    return perf_counter() - begin


def host_times(
    runtime: Runtime, prompts: Sequence[list[int]], batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """The `host` of a steps file: the seconds of a round outside its passes. They are medians over some rounds."""
    for batch, length in product(dict.fromkeys(batches), dict.fromkeys(lengths)):
        scheduler, seconds = runtime.scheduler, list[float]()
        assert isinstance(scheduler, Scheduler)
        scheduler.forget()
        requests = _requests(runtime, prompts, batch, _PROMPT, (_ROUNDS + 1) * length, draft=length > 1)
        for request in requests:
            scheduler.submit(request)
        while not scheduler.idle:
            full = len(scheduler.active) == batch
            begin = perf_counter()
            for emission in scheduler.step(FixedLength(length)):
                if emission.error is not None:
                    raise emission.error
            if full:
                pair = scheduler.pair
                seconds.append(perf_counter() - begin - pair.draft_time - pair.verify_time)
        yield {"batch": batch, "rows": length, "seconds": _rounded(median(seconds))}


def _rounds(
    runtime: Runtime, prompts: Sequence[list[int]], batches: Sequence[int], progress: Progress
) -> Iterator[dict[str, Any]]:
    """Whole rounds of an engine with a scheduler of its own: the mean time of requests that run together."""
    block = runtime.block_size
    tokens = 4 * _ROUNDS * block
    contexts = [context for context in _CONTEXTS if context + tokens <= runtime.max_seq_len]
    contexts = contexts or [max(1, (runtime.max_seq_len - tokens) // 2)]
    tokens = min(tokens, runtime.max_seq_len - contexts[-1])
    settings = list(product(batches, contexts))
    for number, (batch, context) in enumerate(settings, 1):
        for _ in range(2):  # the first time warms up
            requests = _requests(runtime, prompts, batch, context, tokens, draft=True)
            for request in requests:
                runtime.scheduler.submit(request)
            while not runtime.scheduler.idle:
                for emission in runtime.scheduler.step(FixedLength(block)):
                    if emission.error is not None:
                        raise emission.error
        each = [r.statistics for r in requests]
        seconds = mean(s.generation_time / max(1, sum(s.block_length_histogram)) for s in each)
        yield {
            "pass": ROUND,
            "batch": batch,
            "rows": block,
            "context": context,
            "seconds": _rounded(seconds),
        }
        progress("time rounds", number, len(settings))


def _requests(
    runtime: Runtime, prompts: Sequence[list[int]], count: int, length: int, tokens: int, *, draft: bool
) -> list[Request]:
    """Requests with prompts of about `length` tokens, each repeated or cut to it."""
    tokens = min(tokens, runtime.max_seq_len - length)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    made = []
    for number in range(count):
        prompt = prompts[number % len(prompts)]
        prompt = (prompt * -(-length // len(prompt)))[:length]
        made.append(runtime.request(prompt, params, draft=draft))
    return made


def _rounded(seconds: float) -> float:
    return float(f"{max(0.0, seconds):.4g}")
