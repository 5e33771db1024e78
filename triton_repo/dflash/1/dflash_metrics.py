"""The metrics of the Triton model, on the server's metrics port: those of the engine, and what only this model sees."""

from __future__ import annotations

import json
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

COUNTERS = ("_total", "_bucket", "_sum", "_count")  # ends of their names
# Why a request was refused, by the code of the engine's or this model's error.
REASONS = {
    "INVALID_ARG": "invalid_request",
    "BUSY": "queue_full",
    "UNAVAILABLE": "engine_down",
    "CANCELLED": "cancelled",
    "INTERNAL": "error",
}


class TritonMetrics:
    """The engine's counters and gauges on the server's metrics port."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels, self.shown = labels, dict[tuple[str, str], tuple[Any, float | None]]()
        self.families: dict[str, Any] = {}

    def show(self, samples: list[tuple[str, str, dict[str, str], float]]) -> None:
        """Show samples of (name, help, labels, value). Counters end in _total, or belong to a histogram."""
        for name, text, labels, value in samples:
            counter, key = name.endswith(COUNTERS), (name, json.dumps(labels))
            if key not in self.shown:
                try:
                    metric = self.family(name, text, counter).Metric(labels=self.labels | labels)
                except pb_utils.TritonModelException:  # the server runs without metrics
                    return
                # Triton keeps a gauge over a reload, so the first value is always set.
                self.shown[key] = metric, 0.0 if counter else None
            metric, before = self.shown[key]
            if value != before:
                metric.increment(value - before) if counter else metric.set(value)
                self.shown[key] = metric, value

    def rest(self) -> None:
        """An engine has ended: its gauges become 0, and the next engine counts from 0."""
        for (name, labels), (metric, _) in self.shown.items():
            if not name.endswith(COUNTERS):
                metric.set(0.0)
            self.shown[name, labels] = metric, 0.0

    def family(self, name: str, text: str, counter: bool) -> Any:
        """Triton's metrics of one name."""
        if name not in self.families:
            kind = pb_utils.MetricFamily.COUNTER if counter else pb_utils.MetricFamily.GAUGE
            self.families[name] = pb_utils.MetricFamily(name=name, description=text, kind=kind)
        return self.families[name]


class Counts:
    """What only this model sees: refusals by reason, deaths and restarts of the engine, and whether it answers."""

    def __init__(self) -> None:
        self.up, self.deaths, self.restarts, self.lock = 1, 0, 0, threading.Lock()
        self.refused = dict.fromkeys(sorted(REASONS.values()), 0)

    def refuse(self, reason: str) -> None:
        """Count a refused request."""
        with self.lock:
            self.refused[reason] += 1

    def samples(self) -> list[tuple[str, str, dict[str, str], float]]:
        """Name, help, labels and value, as `TritonMetrics.show` takes them."""
        refused = [
            (
                "dflash_requests_refused_total",
                "requests without success, by reason",
                {"reason": reason},
                count,
            )
            for reason, count in self.refused.items()
        ]
        return [
            ("dflash_engine_up", "whether the engine answers", {}, self.up),
            ("dflash_engine_deaths_total", "engine processes that died", {}, self.deaths),
            ("dflash_engine_restarts_total", "engine processes started again", {}, self.restarts),
            *refused,
        ]
