"""Counters and distributions of a scheduler's work, under vLLM's names. prometheus_client collects and writes them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_args

from dflash_trt.decoding.params import FinishReason
from dflash_trt.decoding.prefixes import PrefixCounts
from dflash_trt.decoding.request import Emission
from dflash_trt.decoding.results import Statistics, add_at
from dflash_trt.errors import DFlashError
from dflash_trt.extras import install

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "dflash_"
# Upper bounds of buckets: 0.1 ms to 500 s, tokens of a request, accepted drafts of a round.
_SECONDS = [float(f"{m}e{e}") for e in range(-4, 3) for m in (1, 2, 5)]
_TOKENS = [float(m * 10**e) for e in range(6) for m in (1, 2, 5)]
_ACCEPTED = [float(n) for n in range(16)]

# name: (help, source in the statistics)
_COUNTERS = {
    "prompt_tokens": ("prompt tokens of ended requests that got a token", "num_prompt_tokens"),
    "prompt_tokens_cached": ("prompt tokens of these requests whose rows were reused", "num_cached_tokens"),
    "spec_decode_num_drafts": ("verifications with a draft", "num_drafts"),
    "spec_decode_num_draft_tokens": ("drafted tokens verified", "num_draft_tokens"),
    "spec_decode_num_trees": ("verifications of a tree instead of a chain", "num_trees"),
    "spec_decode_num_tree_nodes": ("nodes of the verified trees", "num_tree_nodes"),
    "spec_decode_num_accepted_tokens": ("drafted tokens accepted", "num_accepted_tokens"),
    "lookup_num_draft_tokens": (
        "of the drafted tokens, those from the text itself",
        "num_lookup_draft_tokens",
    ),
    "lookup_num_accepted_tokens": (
        "of the accepted, those from the text itself",
        "num_lookup_accepted_tokens",
    ),
}
_PREFIX_GAUGES = {
    "limit_bytes": "memory limit of kept prefixes",
    "bytes": "memory of kept prefixes",
    "tokens": "tokens whose rows are kept",
}
_PREFIX_COUNTERS = {
    "kept": "rows of ended requests that were kept",
    "reused": "kept rows copied into slots",
    "dropped": "kept rows dropped to make room for others",
    "refused": "rows of ended requests that did not fit beside the beginning of their own prefix",
}
# name: (help, upper bounds of the buckets)
_DISTRIBUTIONS = {
    "time_to_first_token_seconds": ("arrival to first token", _SECONDS),
    "inter_token_latency_seconds": ("time per token after the first, a share of its round's", _SECONDS),
    "request_time_per_output_token_seconds": ("mean time per token after the first, by request", _SECONDS),
    "request_queue_time_seconds": ("arrival to first prefill pass", _SECONDS),
    "request_prefill_time_seconds": ("first prefill pass to first token", _SECONDS),
    "request_decode_time_seconds": ("first token to last token", _SECONDS),
    "e2e_request_latency_seconds": ("arrival to last token, of completed requests", _SECONDS),
    "request_prompt_tokens": ("prompt tokens of an ended request that got a token", _TOKENS),
    "request_generation_tokens": ("generated tokens of an ended request", _TOKENS),
    "spec_decode_num_accepted_tokens_per_draft": ("drafts accepted by one verification", _ACCEPTED),
}


class Distribution:
    """Values in buckets. bounds: the upper bounds of all of them but the last."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Each upper bound, and the values up to it."""
        return list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))


# Name, help, labels, value.
Sample = tuple[str, str, dict[str, str], float]


class Metrics:
    """Metrics of one scheduler. Its thread writes them; any thread may read them."""

    def __init__(self, cache_tokens: int = 0) -> None:
        """cache_tokens: those of all requests together for which caches have memory."""
        self._lock, self.cache_tokens = Lock(), cache_tokens
        self._total = Statistics(num_requests=0)
        self._reasons: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        self._block_lengths: list[int] = []
        self._generated = self._running = self._waiting = 0
        self._used = 0.0
        self._prefixes = PrefixCounts()
        self._times = {name: Distribution(bounds) for name, (_, bounds) in _DISTRIBUTIONS.items()}

    def observe_round(self, verified: int) -> None:
        """Count one verification pass of `verified` tokens per request."""
        with self._lock:
            add_at(self._block_lengths, verified, 1)

    def observe_step(
        self,
        emissions: Sequence[Emission],
        running: int,
        waiting: int,
        prefixes: PrefixCounts | None = None,
        used: float = 0.0,
    ) -> None:
        """Count one step: its emissions, the running and waiting requests after it, and the prefix counts so far.

        used: the part of the cache's rows that hold tokens of running requests, 0 to 1.
        """
        now = perf_counter()
        with self._lock:
            self._running, self._waiting, self._used = running, waiting, used
            if prefixes is not None and prefixes != self._prefixes:
                self._prefixes = replace(prefixes)
            for emission in emissions:
                self._generated += len(emission.token_ids)
                request, count = emission.request, len(emission.token_ids)
                if count and request.latest_at:
                    self._times["inter_token_latency_seconds"].add((now - request.latest_at) / count, count)
                if count:
                    request.latest_at = now
                if emission.finish_reason is not None:
                    self._ended(emission, emission.finish_reason)

    def _ended(self, emission: Emission, reason: FinishReason) -> None:
        request, statistics = emission.request, emission.request.statistics
        self._reasons[reason] += 1
        if request.options.count_prompt and request.output:
            self._times["request_prompt_tokens"].add(statistics.num_prompt_tokens)
        else:
            statistics = replace(statistics, num_prompt_tokens=0, num_cached_tokens=0)
        self._total = Statistics.merge((self._total, statistics))
        self._times["request_generation_tokens"].add(statistics.num_generation_tokens)
        for accepted, drafts in enumerate(statistics.acceptance_histogram):
            if drafts:
                self._times["spec_decode_num_accepted_tokens_per_draft"].add(accepted, drafts)
        if request.output:
            prefill = statistics.time_to_first_token - statistics.queue_time
            self._times["request_prefill_time_seconds"].add(prefill)
            self._times["request_decode_time_seconds"].add(statistics.generation_time)
            self._times["time_to_first_token_seconds"].add(statistics.time_to_first_token)
            self._times["request_queue_time_seconds"].add(statistics.queue_time)
        if reason in ("stop", "length"):
            self._times["e2e_request_latency_seconds"].add(perf_counter() - request.arrived)
            if statistics.num_generation_tokens > 1:
                per_token = statistics.time_per_output_token
                self._times["request_time_per_output_token_seconds"].add(per_token)

    def collect(self) -> list[Metric]:
        """Every metric that servers show, as prometheus_client's families, so this is a collector for it.

        The counters of a request grow when it ends. Raises DFlashError if prometheus_client is not installed.
        """
        _require()
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def labelled(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
            family = CounterMetricFamily(PREFIX + name, text, labels=[label])
            for key, value in values.items():
                family.add_metric([str(key)], value)
            return family

        with self._lock:
            total, prefixes = self._total, asdict(self._prefixes)
            places = dict(enumerate(total.num_accepted_tokens_per_pos))
            rounds = {n: count for n, count in enumerate(self._block_lengths) if n}
            gauges = {
                "num_requests_running": ("requests running", self._running),
                "num_requests_waiting": ("requests waiting", self._waiting),
                "kv_cache_usage_perc": ("part of the cache rows in use, 0 to 1", self._used),
                "kv_cache_tokens": ("tokens for which caches have memory", self.cache_tokens),
                **{f"prefix_cache_{name}": (text, prefixes[name]) for name, text in _PREFIX_GAUGES.items()},
            }
            counters = {
                "generation_tokens": ("tokens given out", self._generated),
                **{name: (text, getattr(total, source)) for name, (text, source) in _COUNTERS.items()},
                **{
                    f"prefix_cache_{name}_{unit}": (f"{text}, in {unit}", prefixes[f"{name}_{unit}"])
                    for name, text in _PREFIX_COUNTERS.items()
                    for unit in ("tokens", "bytes")
                },
            }
            return [
                *(GaugeMetricFamily(PREFIX + name, text, value) for name, (text, value) in gauges.items()),
                *(
                    CounterMetricFamily(PREFIX + name, text, value)
                    for name, (text, value) in counters.items()
                ),
                labelled("request_success", "ended requests", "finished_reason", self._reasons),
                labelled("spec_decode_num_accepted_tokens_per_pos", "accepted, by place", "position", places),
                labelled("block_length_rounds", "rounds, by tokens verified per request", "length", rounds),
                *(
                    HistogramMetricFamily(PREFIX + name, _DISTRIBUTIONS[name][0], times.buckets(), times.sum)
                    for name, times in self._times.items()
                ),
            ]

    def prometheus(self) -> str:
        """The metrics in Prometheus' text format. Raises DFlashError if prometheus_client is not installed."""
        _require()
        from prometheus_client import generate_latest

        return generate_latest(self).decode()

    def samples(self) -> list[Sample]:
        """The samples of `prometheus`, and the rates of drafting.

        Names of counters end in _total, or as those of a histogram: in _bucket, _sum or _count.
        """
        families = self.collect()
        with self._lock:
            total = self._total
        rates = {
            "mean_acceptance_length": "tokens per verification with a draft, since the engine started",
            "draft_acceptance_rate": "drafted tokens accepted, since the engine started",
        }
        return [
            *(
                (sample.name, family.documentation, sample.labels, sample.value)
                for family in families
                for sample in family.samples
            ),
            *((PREFIX + name, text, {}, getattr(total, name)) for name, text in rates.items()),
        ]


def _require() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise DFlashError(
            f"prometheus_client is not installed; install it with: {install('serve:prometheus-client')}"
        ) from None
