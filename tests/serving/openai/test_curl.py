"""The server as curl sees it: an answer, a stream as it comes, and probes."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.serving.openai.conftest import Server

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
JSON = ("-H", "Content-Type: application/json")
CHAT = {
    "messages": [{"role": "user", "content": "What should I eat in Borvik?"}],
    "max_tokens": 12,
    "temperature": 0,
}


def curl(*words: str) -> str:
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_answer_and_its_stream_have_the_same_text(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    whole = json.loads(curl(url, *JSON, "-d", json.dumps(CHAT)))["choices"][0]["message"]["content"]
    events = [
        line.removeprefix("data: ")
        for line in curl("-N", url, *JSON, "-d", json.dumps(CHAT | {"stream": True})).splitlines()
        if line
    ]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == whole != ""
    assert sum(map(bool, deltas)) > 1


def test_probes_answer_to_curls_fail_option(server: Server) -> None:
    for path in ("health", "ready", "metrics", "version", "v1/models", ""):
        assert curl("--fail", f"{server.url}/{path}")
