"""Counters and distributions of everything a scheduler has served, under vLLM's names, and as Prometheus reads them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from threading import Lock
from time import perf_counter
from typing import Any, get_args

from dflash_trt.decoding.params import FinishReason
from dflash_trt.decoding.prefixes import PrefixCounts
from dflash_trt.decoding.request import Emission
from dflash_trt.decoding.statistics import Statistics, add_at

PREFIX = "dflash_"
_BUCKETS = [m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5)]  # 0.1 ms to 500 s
_RECENT = 4096

# name: (help, where the statistics have it)
_COUNTERS = {
    "prompt_tokens": ("prompt tokens of requests that have ended", "num_prompt_tokens"),
    "prompt_tokens_cached": ("those whose cache rows were taken over", "num_cached_tokens"),
    "spec_decode_num_drafts": ("verifications with a draft", "num_drafts"),
    "spec_decode_num_draft_tokens": ("drafted tokens verified", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("drafted tokens accepted", "num_accepted_tokens"),
}
_PREFIX_GAUGES = {
    "prefix_cache_limit_bytes": "most memory that kept prefixes may take",
    "prefix_cache_bytes": "memory that kept prefixes take",
    "prefix_cache_tokens": "tokens whose rows are kept",
}
_PREFIX_COUNTERS = {
    "kept": "rows copied out of slots, to be kept",
    "reused": "kept rows copied into slots",
    "dropped": "kept rows dropped to make room for others",
    "refused": "rows of ended requests that did not fit beside the beginning of their own prefix",
}
_DISTRIBUTIONS = {
    "time_to_first_token_seconds": "arrival to first token",
    "request_time_per_output_token_seconds": "mean time per token after the first, of one request that came to its end",
    "request_queue_time_seconds": "arrival to first prefill pass",
    "e2e_request_latency_seconds": "arrival to last token, of requests that came to their end",
}


class Distribution:
    """Seconds: cumulative buckets for ever, quantiles over the latest few thousand values."""

    def __init__(self) -> None:
        self.counts, self.sum, self.recent = [0] * (len(_BUCKETS) + 1), 0.0, deque[float](maxlen=_RECENT)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BUCKETS, seconds)] += 1
        self.sum += seconds
        self.recent.append(seconds)

    @property
    def count(self) -> int:
        return sum(self.counts)


class Metrics:
    """What one scheduler has served. Written by the thread that runs it; any thread may read."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._total = Statistics(num_requests=0)
        self._reasons: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._block_lengths: list[int] = []
        self._generated = self._running = self._waiting = 0
        self._prefixes = PrefixCounts()
        self._times = {name: Distribution() for name in _DISTRIBUTIONS}

    def observe_round(self, verified: int) -> None:
        """One verification pass, of `verified` tokens per request."""
        with self._lock:
            add_at(self._block_lengths, verified, 1)

    def observe_step(
        self, emissions: Sequence[Emission], running: int, waiting: int, prefixes: PrefixCounts | None = None
    ) -> None:
        """What one step gave out, and who is there after it; what was done so far with prefixes."""
        with self._lock:
            self._running, self._waiting = running, waiting
            if prefixes is not None:
                self._prefixes = replace(prefixes)
            for emission in emissions:
                self._generated += len(emission.token_ids)
                if emission.finish_reason is not None:
                    self._ended(emission, emission.finish_reason)

    def _ended(self, emission: Emission, reason: FinishReason) -> None:
        request, statistics = emission.request, emission.request.statistics
        self._reasons[reason] += 1
        self._total = Statistics.merge((self._total, statistics))
        if request.output:
            self._times["time_to_first_token_seconds"].add(statistics.time_to_first_token)
            self._times["request_queue_time_seconds"].add(statistics.queue_time)
        if reason in ("stop", "length"):
            self._times["e2e_request_latency_seconds"].add(perf_counter() - request.arrived)
            if statistics.num_generation_tokens > 1:
                per_token = statistics.time_per_output_token
                self._times["request_time_per_output_token_seconds"].add(per_token)

    def snapshot(self) -> dict[str, Any]:
        """Everything, ready for JSON; of each distribution count, mean and the quantiles of the latest values."""
        with self._lock:
            total = self._total
            counts = {name: getattr(total, source) for name, (_, source) in _COUNTERS.items()}
            return counts | {
                "num_requests_running": self._running,
                "num_requests_waiting": self._waiting,
                "generation_tokens": self._generated,
                "request_success": dict(self._reasons),
                "spec_decode_num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
                "block_length_rounds": list(self._block_lengths),
                "prefix_cache": asdict(self._prefixes),
                **{name: _summary(times) for name, times in self._times.items()},
            }

    def prometheus(self) -> str:
        """The text exposition format 0.0.4; the counters of requests rise when these end."""
        lines: list[str] = []

        def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
            lines.append(f"# HELP {PREFIX}{name} {text}")
            lines.append(f"# TYPE {PREFIX}{name} {kind}")
            lines.extend(f"{PREFIX}{name}{rest} {_number(value)}" for rest, value in samples)

        with self._lock:
            total = self._total
            for state in ("running", "waiting"):
                count = self._running if state == "running" else self._waiting
                family(f"num_requests_{state}", "gauge", f"requests {state}", [("", count)])
            reasons = _labelled("finished_reason", self._reasons)
            family("request_success_total", "counter", "requests that have ended", reasons)
            family("generation_tokens_total", "counter", "tokens given out", [("", self._generated)])
            for name, (text, source) in _COUNTERS.items():
                family(f"{name}_total", "counter", text, [("", getattr(total, source))])
            places = dict(enumerate(total.num_accepted_tokens_per_pos))
            accepted = _labelled("position", places)
            family("spec_decode_num_accepted_tokens_per_pos_total", "counter", "accepted, by place", accepted)
            rounds = _labelled("length", {n: c for n, c in enumerate(self._block_lengths) if n})
            family("block_length_rounds_total", "counter", "rounds, by tokens verified per request", rounds)
            for name, text in _PREFIX_GAUGES.items():
                family(
                    name, "gauge", text, [("", getattr(self._prefixes, name.removeprefix("prefix_cache_")))]
                )
            for name, text in _PREFIX_COUNTERS.items():
                for unit in ("tokens", "bytes"):
                    count = getattr(self._prefixes, f"{name}_{unit}")
                    family(
                        f"prefix_cache_{name}_{unit}_total", "counter", f"{text}, in {unit}", [("", count)]
                    )
            for name, times in self._times.items():
                bounds = [*map(_number, _BUCKETS), "+Inf"]
                buckets = zip(bounds, accumulate(times.counts), strict=True)
                samples = [(f'_bucket{{le="{bound}"}}', count) for bound, count in buckets]
                ends = [("_sum", times.sum), ("_count", times.count)]
                family(name, "histogram", _DISTRIBUTIONS[name], [*samples, *ends])
        return "\n".join(lines) + "\n"


def quantile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of a non-empty sequence does not exceed."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def _summary(times: Distribution) -> dict[str, float]:
    if not times.recent:
        return {"count": 0}
    values = sorted(times.recent)
    quantiles = {f"p{p}": quantile(values, p / 100) for p in (50, 90, 99)}
    return {"count": times.count, "mean": times.sum / times.count, **quantiles}


def _labelled(label: str, values: Mapping[Any, int]) -> list[tuple[str, float]]:
    return [(f'{{{label}="{key}"}}', value) for key, value in values.items()]


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else f"{value:.10g}"
