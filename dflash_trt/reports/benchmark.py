"""Throughput and latency of bundles under load: plain decoding and drafting in one run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

import numpy as np

from dflash_trt.bundle.workspace import Progress, silent
from dflash_trt.decoding.length.policy import Lengths
from dflash_trt.decoding.params import RequestOptions, SamplingParams
from dflash_trt.decoding.request import Request
from dflash_trt.decoding.results import Statistics
from dflash_trt.runtime import Runtime

_SEGMENTS = 4
_WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Load:
    """A number of concurrent requests, each followed by the next. With a rate, arrivals by a Poisson process."""

    concurrency: int
    rate: float | None = None  # requests per second; `concurrency` then limits the requests decoded at a time

    @property
    def name(self) -> str:
        return str(self.concurrency) if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Method:
    """One way of decoding with one bundle.

    name: "plain" decodes without drafts, "lookup" with those from the text itself alone.
    lengths: chooses how much is drafted.
    prompts: token ids. Request i has prompt i, from the first again after the last.
    """

    bundle: str
    name: str
    runtime: Runtime
    prompts: Sequence[list[int]]
    lengths: Lengths


@dataclass
class MethodPoint:
    """One method under one load."""

    load: Load
    method: Method
    seconds: float = 0.0
    requests: list[Request] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    @property
    def outputs(self) -> list[list[int]]:
        return [r.output[: r.statistics.num_generation_tokens] for r in self.requests]

    def to_dict(self) -> dict[str, Any]:
        """The figures for JSON, with times in milliseconds. TPOT is (last token - first token) / (tokens - 1)."""
        statistics = [r.statistics for r in self.requests]
        total = Statistics.merge(statistics)
        passes = total.draft_time + total.verify_time + total.host_time
        rounds = total.block_length_histogram
        return {
            "concurrency": self.load.concurrency if self.load.rate is None else None,
            "rate": self.load.rate,
            "bundle": self.method.bundle,
            "method": self.method.name,
            "requests": len(statistics),
            "seconds": round(self.seconds, 3),
            "output_tokens": total.num_generation_tokens,
            "tokens_per_second": round(total.num_generation_tokens / self.seconds, 1),
            "requests_per_second": round(len(statistics) / self.seconds, 3),
            "tpot_ms": _times(s.time_per_output_token for s in statistics if s.num_generation_tokens > 1),
            "ttft_ms": _times(s.time_to_first_token for s in statistics),
            "queue_ms": _times(s.queue_time for s in statistics),
            "e2e_ms": _times(self.latencies),
            "round_ms": round(1e3 * passes / max(sum(rounds), 1), 3),
            "host_share": round(total.host_time / passes, 4) if passes else 0.0,
            "draft_share": round(total.draft_time / passes, 4) if passes else 0.0,
            "tokens_per_pass": round(total.tokens_per_pass, 3),
            "draft_acceptance_rate": round(total.draft_acceptance_rate, 4),
            "mean_block_length": round(sum(n * c for n, c in enumerate(rounds)) / max(sum(rounds), 1), 2),
            "block_length_histogram": rounds,
        }


def bench(
    methods: Sequence[Method],
    loads: Sequence[Load],
    *,
    requests: int,
    max_tokens: int,
    progress: Progress = silent,
) -> Iterator[list[MethodPoint]]:
    """For every load, one point per method. Every method gets the same greedy requests, and no cached rows of another
    method.

    Under one load the methods take turns several times, so that a slow moment of the machine affects all of them.
    """
    for load in loads:
        # The end of a segment has too few requests in flight. A long segment gives that little weight.
        segments = max(1, min(_SEGMENTS, requests // (3 * load.concurrency)))
        points = [MethodPoint(load, method) for method in methods]
        step, done = f"load {load.name}", 0
        progress(step, 0, requests * len(methods))
        for method in methods:
            warm_up = min(max_tokens, _WARM_UP_TOKENS)
            _segment(MethodPoint(load, method), range(load.concurrency), warm_up)
        for segment in range(segments):
            numbers = range(requests * segment // segments, requests * (segment + 1) // segments)
            first = segment % len(points)
            for point in points[first:] + points[:first]:
                _segment(point, numbers, max_tokens)
                done += len(numbers)
                progress(step, done, requests * len(methods))
        yield points


def _segment(point: MethodPoint, numbers: range, max_tokens: int) -> None:
    """Serve these requests to the end."""
    method = point.method
    runtime, prompts = method.runtime, method.prompts
    scheduler, rate = runtime.scheduler, point.load.rate
    scheduler.forget()
    gaps = random.Random(numbers.start)
    params = SamplingParams(max_tokens=max_tokens)
    source = "lookup" if method.name == "lookup" else "drafter,lookup"
    options = RequestOptions(speculate=method.name != "plain", draft_source=source)
    waiting = deque(runtime.request(prompts[n % len(prompts)], params, options) for n in numbers)
    point.requests += waiting
    begin = due = perf_counter()
    in_flight = 0
    while waiting or in_flight:
        now = perf_counter()
        while waiting and (in_flight < point.load.concurrency if rate is None else due <= now):
            request = waiting.popleft()
            # In an open loop the wait starts at the arrival, even if that was in the middle of a round.
            request.arrived = now if rate is None else due
            if rate is not None:
                due += gaps.expovariate(rate)
            scheduler.submit(request)
            in_flight += 1
        if not in_flight:
            sleep(max(0.0, due - now))
            continue
        for emission in scheduler.step(method.lengths):
            if emission.error is not None:
                raise emission.error
            if emission.finish_reason is not None:
                in_flight -= 1
                point.latencies.append(perf_counter() - emission.request.arrived)
    point.seconds += perf_counter() - begin


def _times(seconds: Iterable[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99 in milliseconds. A quantile is the smallest value that so many do not exceed."""
    values = 1e3 * np.array([*seconds])
    if not values.size:
        return {}
    figures = [values.mean(), *np.percentile(values, (50, 90, 99), method="inverted_cdf")]
    return {
        name: round(float(figure), 3)
        for name, figure in zip(("mean", "p50", "p90", "p99"), figures, strict=True)
    }
