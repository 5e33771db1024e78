"""The Triton model with a double of Triton's Python module: each request is answered once."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt.serving.deploy import template
from dflash_trt.serving.worker import _named


class Sender:
    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []

    def send(self, response: Any, *, flags: int) -> None:
        self.sent.append((response, bool(flags)))


class Error:
    INTERNAL = 1

    def __init__(self, text: str, code: int) -> None:
        self.text = text


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    triton = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=RuntimeError,
        TritonError=type(
            "TritonError", (), {"INTERNAL": 1, "__init__": lambda s, text, code: setattr(s, "text", text)}
        ),
        InferenceResponse=lambda tensors=None, error=None: tensors if error is None else error.text,
        Tensor=lambda name, values: (name, values.tolist()),
        Logger=SimpleNamespace(log_error=print),
        unload_model=lambda name: None,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    spec = importlib.util.spec_from_file_location("model", template() / "dflash" / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_answer_that_cannot_be_passed_on_ends_its_request_alone(model: Any) -> None:
    triton, (ours, theirs) = model.TritonPythonModel(), socket.socketpair()
    senders = [Sender() for _ in range(3)]
    triton.pending = {i: model.PendingRequest(sender, set()) for i, sender in enumerate(senders)}
    triton.lock, triton.socket, triton.unread, triton.closing = threading.Lock(), ours, b"", True
    thread = threading.Thread(target=triton.receive)
    thread.start()
    good, told = {"text": "a", "token_ids": [1]}, theirs.makefile("rb")
    wrong = {"text": "a", "token_ids": None}
    theirs.sendall(json.dumps([[0, good], [1, wrong], [2, good]]).encode() + b"\n")
    assert json.loads(told.readline()) == {"cancel": 1}
    theirs.sendall(
        json.dumps([[2, good | {"finish_reason": None}], [0, good | {"finish_reason": "stop"}]]).encode()
    )
    theirs.sendall(b"\n")
    assert json.loads(told.readline()) == {"cancel": 2}
    theirs.shutdown(socket.SHUT_WR)
    thread.join(20)
    assert not thread.is_alive()
    assert triton.pending == {}
    assert [[final for _, final in sender.sent] for sender in senders] == [
        [False, True],
        [True],
        [False, True],
    ]
    assert senders[1].sent[0][0].startswith("TypeError: ")
    assert senders[2].sent[1][0].startswith("AttributeError: ")


def test_errors_have_the_names_of_the_api() -> None:
    said = "regex cannot be compiled: x"
    assert _named(said, "text_input") == "guided_decoding_guide cannot be compiled: x"
    assert _named("the prompt is empty", "input_ids") == "input_ids is empty"
    assert _named(said, "the prompt") == said
