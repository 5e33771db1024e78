"""The text of /metrics: the engine's own metrics, and what only the server in front of it sees."""

from __future__ import annotations

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
        self._refused = dict.fromkeys(sorted(set(REASONS.values())), 0)

    def observe(self, status: int, end: int) -> None:
        """Count one answered request. `end`: the status that tells how it ended."""
        self._answers[status] = self._answers.get(status, 0) + 1
        if end >= 400:
            self._refused[REASONS.get(end, "error")] += 1

    async def text(self) -> str:
        """Prometheus' text format 0.0.4. A dead engine has no metrics of its own, and engine_up 0."""
        try:
            engine, up = await self._engine.metrics(), 1
        except EngineDownError:
            engine, up = "", 0
        lines = [
            *_family("engine_up", "gauge", "whether the engine answers", {"": up}),
            *_family("engine_deaths_total", "counter", "engine processes that died", {"": self._engine.deaths}),
            *_family("engine_restarts_total", "counter", "engine processes started again", {"": self._engine.restarts}),
            *_family(
                "http_responses_total", "counter", "answers, by status",
                {f'{{status="{status}"}}': count for status, count in sorted(self._answers.items())},
            ),
            *_family(
                "requests_refused_total", "counter", "requests without success, by reason",
                {f'{{reason="{reason}"}}': count for reason, count in self._refused.items()},
            ),
        ]  # fmt: skip
        return engine + "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str, values: dict[str, int]) -> list[str]:
    name = PREFIX + name
    samples = [f"{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
