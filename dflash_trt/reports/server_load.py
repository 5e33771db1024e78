"""Load on a server of OpenAI's API, with the metrics and their names of `vllm bench serve`.

Source: vllm/benchmarks/serve.py (https://github.com/vllm-project/vllm). E2E lasts from sending to the last event with
text. TPOT is (E2E - TTFT) / (tokens - 1). ITL is the time between two events, which is that of a round here.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np

from dflash_trt.bundle.workspace import Progress, silent
from dflash_trt.errors import DFlashError
from dflash_trt.reports.benchmark import Load
from dflash_trt.reports.http_stream import LoadedServer, StreamedAnswer

# Name in the JSON document -> values of one answer, in seconds.
TIMES: dict[str, Callable[[StreamedAnswer], list[float]]] = {
    "ttft": lambda a: [a.moments[0] - a.begun],
    "tpot": lambda a: [(a.moments[-1] - a.moments[0]) / (a.tokens - 1)] if a.tokens > 1 else [],
    "itl": lambda a: [later - earlier for earlier, later in zip(a.moments, a.moments[1:], strict=False)],
    "e2el": lambda a: [a.moments[-1] - a.begun],
}


@dataclass
class LoadPoint:
    """The answers to one load."""

    load: Load
    seconds: float = 0.0
    answers: list[StreamedAnswer] = field(default_factory=list)

    @property
    def completed(self) -> list[StreamedAnswer]:
        """Those without an error."""
        return [answer for answer in self.answers if answer.ok]

    def to_dict(self) -> dict[str, Any]:
        """The figures, under vLLM's names; times in milliseconds. `errors` counts the faults by their message."""
        done = self.completed
        tokens = sum(answer.tokens for answer in done)
        prompts = sum(int(answer.usage.get("prompt_tokens") or 0) for answer in done)
        drafts = sum(_speculation(answer, "draft_tokens") for answer in done)
        accepted = sum(_speculation(answer, "accepted_tokens") for answer in done)
        faults = Counter(_fault(answer) for answer in self.answers if not answer.ok)
        return {
            "max_concurrency": self.load.concurrency if self.load.rate is None else None,
            "request_rate": self.load.rate,
            "completed": len(done),
            "failed": len(self.answers) - len(done),
            "errors": dict(faults),
            "duration": round(self.seconds, 3),
            "total_input_tokens": prompts,
            "total_output_tokens": tokens,
            "request_throughput": round(len(done) / self.seconds, 3),
            "output_throughput": round(tokens / self.seconds, 2),
            "total_token_throughput": round((prompts + tokens) / self.seconds, 2),
            "draft_acceptance_rate": round(accepted / drafts, 4) if drafts else None,
            **{key: value for name, of in TIMES.items() for key, value in _summary(name, of, done)},
        }


def _summary(
    name: str, of: Callable[[StreamedAnswer], list[float]], done: Sequence[StreamedAnswer]
) -> Iterator[tuple[str, float | None]]:
    values = 1e3 * np.array([value for answer in done for value in of(answer)])
    figures: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    for kind, figure in (figures | {"p99": partial(np.percentile, q=99)}).items():
        yield f"{kind}_{name}_ms", round(float(figure(values)), 3) if len(values) else None


def _speculation(answer: StreamedAnswer, name: str) -> int:
    """A count of drafts that this package's server gives."""
    return int((answer.usage.get("speculation") or {}).get(name, 0))


def _fault(answer: StreamedAnswer) -> str:
    return f"{answer.status or 'no answer'}: {answer.error or 'no event has text'}"


def measure(
    server: LoadedServer,
    bodies: Sequence[tuple[str, dict[str, Any]]],
    loads: Sequence[Load],
    *,
    requests: int,
    progress: Progress = silent,
) -> Iterator[LoadPoint]:
    """One point for each load. Its requests are `bodies`, paths and JSON, in turn.

    Raises DFlashError if the server does not answer the first request, which is not counted.
    """
    first = server.stream(*bodies[0])
    if not first.ok:
        raise DFlashError(f"{server.url}{bodies[0][0]} does not answer: {_fault(first)}")
    for load in loads:
        point, step = LoadPoint(load), f"load {load.name}"
        progress(step, 0, requests)
        begin = perf_counter()
        for answer in _answers(server, [bodies[n % len(bodies)] for n in range(requests)], load):
            point.answers.append(answer)
            progress(step, len(point.answers), requests)
        point.seconds = perf_counter() - begin
        yield point


def _answers(
    server: LoadedServer, bodies: Sequence[tuple[str, dict[str, Any]]], load: Load
) -> Iterator[StreamedAnswer]:
    """The answers as they come. Threads send the requests: as many as are in flight."""
    answers = queue.SimpleQueue[StreamedAnswer]()
    waiting = queue.SimpleQueue[tuple[str, dict[str, Any]]]()

    def answer(body: tuple[str, dict[str, Any]]) -> None:
        answers.put(server.stream(*body))

    def one_after_another() -> None:
        while True:
            try:
                body = waiting.get_nowait()
            except queue.Empty:
                return
            answer(body)

    def by_poisson() -> None:
        gaps, due = random.Random(0), perf_counter()
        for body in bodies:
            sleep(max(0.0, due - perf_counter()))
            _start(partial(answer, body))
            due += gaps.expovariate(load.rate or 1.0)

    if load.rate is None:
        for body in bodies:
            waiting.put(body)
        for _ in range(min(load.concurrency, len(bodies))):
            _start(one_after_another)
    else:
        _start(by_poisson)
    for _ in bodies:
        yield answers.get()


def _start(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()  # Ctrl-C ends it with the program
