"""The Triton model `dflash`: passes requests to an engine process, and its answers back.

The engine (`dflash_trt.serving.worker`) is a separate process, so that this process notices its end: it refuses all
requests in flight and starts another one. If this process dies, Triton leaves its requests unanswered and starts no
other one. Then the engine ends the server.

One thread reads the engine's answers and sends them. Several waiting updates of a request are sent as one response. So
a busy server sends larger chunks, not later ones.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflash_wire as wire
import triton_python_backend_utils as pb_utils
from dflash_request import PendingRequest, Refused, longest_input, named, read_request, tensors

CANCELLATION_CHECK_SECONDS = 0.1
COUNTERS = ("_total", "_bucket", "_sum", "_count")  # ends of their names
# Why a request was refused, by the code of the engine's or this model's error.
REASONS = {
    "INVALID_ARG": "invalid_request",
    "BUSY": "queue_full",
    "UNAVAILABLE": "engine_down",
    "CANCELLED": "cancelled",
    "INTERNAL": "error",
}


class TritonPythonModel:
    """The model as Triton's Python backend calls it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the bundle in an engine process."""
        name = args["model_name"]
        given = json.loads(args["model_config"])["parameters"]
        texts = {key: value["string_value"] for key, value in given.items()}
        python = texts.get("python") or sys.executable
        settings = json.loads(texts.get("options") or "{}")
        settings["server"] = os.getppid()
        settings["bundle"] = str((Path(pb_utils.get_model_dir()) / texts["bundle"]).resolve())
        self.command = python, settings
        self.pending: dict[int, PendingRequest] = {}
        self.lock = threading.Lock()  # guards the following fields, and writing to the engine
        self.numbers = itertools.count(1)  # numbers of requests
        self.failure = ""  # the reason why there is no engine
        self.closing = threading.Event()
        self.metrics = TritonMetrics({"model": name, "version": args["model_version"]})
        self.counts, self.own_counts = Counts(), TritonMetrics(self.metrics.labels)
        if failure := self.start():
            raise pb_utils.TritonModelException(failure)
        threading.Thread(target=self.run, name="answers", daemon=True).start()
        threading.Thread(target=self.watch, name="cancellation", daemon=True).start()

    def start(self) -> str:
        """Start an engine process, and wait until it is ready. Returns why it is not, or ""."""
        python, settings = self.command
        ours, theirs = socket.socketpair()
        command = wire.command(python, theirs, settings)
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        answers = received(ours)
        (first,) = next(answers, [{}])
        if "ready" not in first:
            engine.kill()
            return first.get("fatal") or f"while loading, {how_it_ended(engine)}"
        with self.lock:
            self.socket, self.engine, self.answers, self.failure = ours, engine, answers, ""
            self.longest_line = first["longest_line"]
            self.tell(wire.line({"watch": "metrics"}))
        return ""

    def execute(self, requests: list[Any]) -> None:
        """Pass requests on. The answers come from `receive`."""
        for request in requests:
            pending = PendingRequest(request.get_response_sender())
            try:
                message = read_request(request, pending)
            except Refused as error:
                self.refuse(pending, "INVALID_ARG", str(error))
                continue
            except Exception as error:  # an unexpected error: this request must not wait forever
                self.refuse(pending, "INTERNAL", f"{type(error).__name__}: {error}")
                continue
            message["id"] = next(self.numbers)
            line = wire.line(message)
            if len(line) > self.longest_line:
                text = f"{longest_input(message, pending.prompt)}, and a request at most {self.longest_line}"
                self.refuse(pending, "INVALID_ARG", text)
                continue
            with self.lock:
                failure = self.failure
                if not failure:
                    self.pending[message["id"]] = pending
                    self.tell(line)
            if failure:
                self.refuse(pending, "UNAVAILABLE", failure)

    def refuse(self, pending: PendingRequest, code: str, message: str) -> None:
        """Answer with an error, and count it under the code's reason."""
        self.counts.refuse(REASONS[code])
        pending.refuse(code, message)

    def finalize(self) -> None:
        """Triton unloads the model. No request is in flight."""
        self.closing.set()
        with self.lock:
            self.tell(wire.line({"end": True}))
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        try:
            self.engine.wait(10)
        except subprocess.TimeoutExpired:
            self.engine.kill()
            self.engine.wait()
        self.show_no_engine()

    def tell(self, line: bytes) -> None:
        """Send to the engine. `run` notices a dead engine. Call it under the lock."""
        with contextlib.suppress(OSError):
            self.socket.sendall(line)

    def run(self) -> None:
        """The thread that reads answers, and starts another engine after one has died."""
        pause = wire.FIRST_PAUSE
        while True:
            began = time.monotonic()
            self.receive()
            if self.closing.is_set():
                return
            self.engine_ended()
            pause = wire.next_pause(pause, time.monotonic() - began)
            while not self.closing.wait(pause) and (failure := self.start()):
                pb_utils.Logger.log_error(f"dflash: the engine does not start: {failure}")
                pause = wire.next_pause(pause)
            self.counts.restarts += 1
            self.counts.up = 1

    def receive(self) -> None:
        """Pass the answers of an engine on until it ends."""
        for said in self.answers:
            updates: dict[tuple[int, int], wire.Update] = {}  # by request and sequence
            for key, update in itertools.chain.from_iterable(said):
                if key == "metrics":
                    self.metrics.show(update)
                    self.own_counts.show(self.counts.samples())
                    continue
                place = key, update.get("index", 0)
                if place in updates:
                    wire.merge(updates[place], update)
                else:
                    updates[place] = update
            for (key, _), update in updates.items():
                self.respond(key, update)

    def respond(self, key: int, update: wire.Update) -> None:
        """Send a request's update, and forget the request after the last one."""
        pending = self.pending.get(key)
        if pending is None:  # cancelled while it ended
            return
        pending.left -= "finish_reason" in update
        final = "error" in update or pending.left == 0
        if final:
            with self.lock:
                del self.pending[key]
        try:
            if "token_ids" in update:
                response = pb_utils.InferenceResponse(tensors(pending, update))
                pending.send(response, final=final and "error" not in update)
            if "error" in update:
                self.refuse(pending, update["error"]["code"], named(update["error"], pending.prompt))
        except Exception as error:  # an unexpected error: this request gets it, the others continue
            with self.lock:
                self.pending.pop(key, None)
                self.tell(wire.line({"cancel": key}))
            self.counts.refuse("error")
            pending.give_up(error)

    def watch(self) -> None:
        """The thread that notices clients that leave. It tells the engine, whose answer ends the request."""
        while not self.closing.wait(CANCELLATION_CHECK_SECONDS):
            with self.lock:
                all_pending = list(self.pending.items())
            for key, pending in all_pending:
                if pending.has_left():
                    with self.lock:
                        self.tell(wire.line({"cancel": key}))

    def show_no_engine(self) -> None:
        """Show that the engine does not answer, on the metrics port."""
        self.counts.up = 0
        self.metrics.rest()
        self.own_counts.show(self.counts.samples())

    def engine_ended(self) -> None:
        """Refuse all requests in flight, and those to come until another engine is there."""
        failure = f"{how_it_ended(self.engine)}; it is being started again"
        with self.lock:
            self.failure = failure
            all_pending, self.pending = list(self.pending.values()), {}
        pb_utils.Logger.log_error(f"dflash: {failure}; {len(all_pending)} requests are refused")
        for pending in all_pending:
            self.refuse(pending, "UNAVAILABLE", failure)
        self.counts.deaths += 1
        self.show_no_engine()


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


def received(connection: socket.socket) -> Iterator[list[Any]]:
    """What the engine says, one or more lines at a time, until it ends."""
    lines = wire.Lines()
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 20):
            if values := lines.push(data):
                yield values


def how_it_ended(engine: subprocess.Popen[bytes]) -> str:
    """How an engine process ended, which this waits for."""
    return f"the engine process ended ({wire.how_it_ended(engine.wait())})"
