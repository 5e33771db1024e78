"""The text of /metrics: the engine's own metrics, and what only the server in front of it sees."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dflash_trt.decoding.metrics import PREFIX
from dflash_trt.serving.openai.engine import EngineDownError, EngineProcess
from dflash_trt.serving.openai.errors import REASONS


class ServerMetrics:
    """Counts of answers and refusals, and the state of the engine.

    The engine's counters start again at 0 with a new process, which Prometheus' `rate` expects. These do not.
    """

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._answers: dict[int, int] = {}
        self._up = 0
        self._refused = dict.fromkeys(sorted(set(REASONS.values())), 0)

    def observe(self, status: int, end: int) -> None:
        """Count one answered request. `end`: the status that tells how it ended."""
        self._answers[status] = self._answers.get(status, 0) + 1
        if end >= 400:
            self._refused[REASONS.get(end, "error")] += 1

    async def text(self) -> str:
        """Prometheus' text format. A dead engine has no metrics of its own, and engine_up 0."""
        try:
            engine, up = await self._engine.metrics(), 1
        except EngineDownError:
            engine, up = "", 0
        self._up = up
        return engine + generate_latest(self).decode()

    def collect(self) -> list[Metric]:
        """The families that are this server's, for prometheus_client."""
        deaths, restarts = self._engine.deaths, self._engine.restarts
        answers = CounterMetricFamily(f"{PREFIX}http_responses", "answers, by status", labels=["status"])
        for status, count in sorted(self._answers.items()):
            answers.add_metric([str(status)], count)
        refused = CounterMetricFamily(
            f"{PREFIX}requests_refused", "requests without success, by reason", labels=["reason"]
        )
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        return [
            GaugeMetricFamily(f"{PREFIX}engine_up", "whether the engine answers", self._up),
            CounterMetricFamily(f"{PREFIX}engine_deaths", "engine processes that died", deaths),
            CounterMetricFamily(f"{PREFIX}engine_restarts", "engine processes started again", restarts),
            answers,
            refused,
        ]
