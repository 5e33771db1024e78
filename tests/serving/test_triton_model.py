"""The Triton model with a double of Triton's Python module: each request is answered once."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from dflash_trt.errors import RequestError
from dflash_trt.serving.deploy import copy_code
from dflash_trt.serving.wire import Code, refusal


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []

    def send(self, response: Any, *, flags: int) -> None:
        self.sent.append((response, bool(flags)))


class Error:
    INTERNAL = 1

    def __init__(self, text: str, code: int) -> None:
        self.text = text


class Family:
    """Triton's metrics. `values` has every sample by its name and labels."""

    COUNTER = GAUGE = 0
    values: ClassVar[dict[tuple[str, str], float]] = {}

    def __init__(self, *, name: str, description: str, kind: int) -> None:
        self.name = name

    def Metric(self, *, labels: dict[str, str]) -> Any:
        key = self.name.removeprefix("dflash_"), labels.get("reason", "")
        self.values.setdefault(key, 0)  # Triton keeps it over a reload

        def increment(by: float) -> None:
            assert by > 0
            self.values[key] += by

        return SimpleNamespace(increment=increment, set=lambda value: self.values.update({key: value}))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    triton = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=RuntimeError,
        TritonError=type(
            "TritonError",
            (),
            {
                **dict.fromkeys(("INTERNAL", "UNAVAILABLE", "INVALID_ARG", "CANCELLED"), 1),
                "__init__": lambda s, text, code: setattr(s, "text", text),
            },
        ),
        InferenceResponse=lambda tensors=None, error=None: tensors if error is None else error.text,
        Tensor=lambda name, values: (name, values.tolist()),
        Logger=SimpleNamespace(log_error=print),
        get_model_dir=lambda: str(tmp_path),
        MetricFamily=Family,
    )
    Family.values.clear()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    copy_code(folder := tmp_path / "1")
    monkeypatch.syspath_prepend(str(folder))  # Triton does so, too
    for module in ("dflash_request", "dflash_wire"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engines:
    """Engine processes of a model, as the ends of their sockets. `code`: how they end."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch, code: int = -9) -> None:
        self.started: list[socket.socket] = []
        self.code = code
        monkeypatch.setattr(model.subprocess, "Popen", self.popen)

    def popen(self, command: list[str], *, pass_fds: list[int], stdin: int) -> Any:
        theirs = socket.socket(fileno=os.dup(pass_fds[0]))
        theirs.sendall(json.dumps({"ready": True, "longest_line": 1 << 20}).encode() + b"\n")
        self.started.append(theirs)
        return SimpleNamespace(wait=lambda timeout=None: self.code, kill=lambda: None)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def loaded(model: Any, requests: int) -> Any:
    """A model that Triton has loaded, with pending requests."""
    triton = model.TritonPythonModel()
    parameters = {"bundle": {"string_value": "bundle"}, "python": {"string_value": ""}}
    config = json.dumps({"parameters": parameters})
    triton.initialize({"model_name": "dflash", "model_version": "1", "model_config": config})
    triton.pending |= {i: model.PendingRequest(Sender()) for i in range(requests)}
    return triton


def test_an_answer_that_cannot_be_passed_on_ends_its_request_alone(model, monkeypatch) -> None:
    engines = Engines(model, monkeypatch)
    triton = loaded(model, 3)
    senders = [pending._sender for pending in triton.pending.values()]
    good, wrong = {"text": "a", "token_ids": [1]}, {"text": "a", "token_ids": None}
    (theirs,) = engines.started
    told = theirs.makefile("rb")
    assert json.loads(told.readline()) == {"watch": "metrics"}
    theirs.sendall(json.dumps([[0, good], [1, wrong], [2, good]]).encode() + b"\n")
    assert json.loads(told.readline()) == {"cancel": 1}
    ends = [[2, good | {"finish_reason": None}], [0, good | {"finish_reason": "stop"}]]
    theirs.sendall(json.dumps(ends).encode() + b"\n")
    assert json.loads(told.readline()) == {"cancel": 2}
    triton.finalize()
    assert json.loads(told.readline()) == {"end": True}
    assert told.readline() == b""
    until(lambda: triton.pending == {})
    finals = [[final for _, final in sender.sent] for sender in senders]
    assert finals == [[False, True], [True], [False, True]]
    assert senders[1].sent[0][0].startswith("TypeError: ")
    assert senders[2].sent[1][0].startswith("AttributeError: ")


def test_another_engine_is_started_and_counts_go_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(model, monkeypatch)
    triton = loaded(model, 0)
    sample = ["dflash_generation_tokens_total", "tokens", {}, 7]
    codes: list[Code] = ["BUSY", "INVALID_ARG", "CANCELLED"]
    for life in range(2):
        theirs = engines.started[life]
        senders = [Sender() for _ in range(5)]
        triton.pending |= {i: model.PendingRequest(sender) for i, sender in enumerate(senders)}
        answers: list[Any] = [[i, refusal(code, "why")] for i, code in enumerate(codes)]
        theirs.sendall(json.dumps([*answers, ["metrics", [sample]]]).encode() + b"\n")
        theirs.close()  # the engine dies with two requests in flight
        until(lambda life=life: len(engines.started) == life + 2)
        ended = "the engine process ended (SIGKILL); it is being started again"
        assert [sender.sent for sender in senders] == [[("why", True)]] * 3 + [[(ended, True)]] * 2
        counts = dict.fromkeys(("cancelled", "invalid_request", "queue_full"), life + 1)
        counts |= {"engine_down": 2 * (life + 1), "error": 0}
        assert {key: Family.values[key] for key in Family.values if key[0] != "engine_restarts_total"} == {
            ("generation_tokens_total", ""): 7 * (life + 1),
            ("engine_up", ""): 0,
            ("engine_deaths_total", ""): life + 1,
            **{("requests_refused_total", reason): count for reason, count in counts.items()},
        }
    assert triton.failure == ""
    assert triton.counts.restarts == 2
    triton.finalize()


def test_errors_have_the_names_of_the_inputs(model: Any) -> None:
    def named(text: str) -> str:
        return str(model.named(refusal("INVALID_ARG", text, RequestError(text).field)["error"], "input_ids"))

    assert named("regex cannot be compiled: x") == "guided_decoding_guide cannot be compiled: x"
    assert named("structured_outputs: x") == "guided_decoding_guide: x"
    assert named("the prompt is empty") == "input_ids is empty"
    assert named("n is 0, expected an integer") == "num_return_sequences is 0, expected an integer"
    assert named("top_p is 2, expected 0 to 1") == "top_p is 2, expected 0 to 1"
    assert named("messages[0].role is 5") == "messages[0].role is 5"


def test_the_model_s_code_needs_numpy_alone(tmp_path: Path) -> None:
    copy_code(folder := tmp_path / "1")
    (folder / "triton_python_backend_utils.py").touch()
    program = (
        "import sys; before = {*sys.modules}; sys.path.append(sys.argv[1]); import model\n"
        "roots = {name.partition('.')[0] for name in {*sys.modules} - before} - sys.stdlib_module_names\n"
        "print(*sorted(root for root in roots if not root.startswith('_')))"
    )
    command = [sys.executable, "-I", "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == [
        "dflash_request", "dflash_wire", "model", "numpy", "triton_python_backend_utils",
    ]  # fmt: skip
