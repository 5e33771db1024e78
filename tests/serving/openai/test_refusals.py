"""Refusals name the field, and have the status that clients act on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.openai.conftest import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BIASES = {str(i): 1 for i in range(1025)}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (COMPLETIONS, {"prompt": "x", "foo": 1}, "foo", "foo is not a field that this server knows"),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature", 'temperature is "hot"'),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "expected 0 (greedy) or 0.01 to 100"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "expected an integer, 1 to"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 4000}, "prompt", "max_tokens is 4000"),
        (COMPLETIONS, {"prompt": "x", "seed": 2**70}, "seed", "seed is 11805"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "n is 0"),
        (COMPLETIONS, {"prompt": "x", "block_length": 99}, "block_length", "block_length is 99"),
        (COMPLETIONS, {"prompt": "x", "tree_nodes": 8}, "tree_nodes", "tree_nodes is 8, but this bundle drafts chains"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "suffix is"),
        (COMPLETIONS, {"prompt": []}, "prompt", "prompt is []"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "the prompt is empty"),
        (COMPLETIONS, {"prompt": [1, 99999]}, "prompt", "token id 99999"),
        (COMPLETIONS, {"prompt": [5] * 600}, "prompt", "600 tokens, but this model holds 512"),
        (COMPLETIONS, {"prompt": "x" * 100_000}, "prompt", "100000 bytes"),
        (COMPLETIONS, {}, "prompt", "prompt is missing"),
        # Before anything is copied or tokenized: these prompts would be too long.
        (COMPLETIONS, {"prompt": ["x" * 3000] * 300}, "n", "asks for 300 answers"),
        (COMPLETIONS, {"prompt": ["x" * 4000] * 3, "n": 128}, "n", "asks for 384 answers"),
        (COMPLETIONS, {"prompt": "x" * 4000, "logit_bias": BIASES}, "logit_bias", "at most 1024"),
        (COMPLETIONS, {"prompt": "x" * 4000, "stop_token_ids": [5] * 1025}, "stop_token_ids", "at most 1024"),
        (COMPLETIONS, {"prompt": "x" * 4000, "bad_words": ["x"] * 1025}, "bad_words", "at most 1024"),
        (COMPLETIONS, {"prompt": "x" * 4000, "stop": ["x"] * 1025}, "stop", "at most 1024"),
        (CHAT, {"messages": [{"role": "user"}] * 16385}, "messages", "at most 16384"),
        (CHAT, {"messages": []}, "messages", "messages is []"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0].type",
            'is "image_url": this server reads text only',
        ),
        (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities", "audio"),
        (CHAT, {"messages": HELLO, "model": "gpt-5"}, "model", "this server has tiny"),
        (CHAT, {"messages": HELLO, "timeout": 0}, "timeout", "timeout is 0"),
        (CHAT, [1], None, "the body is [1], expected a JSON object"),
        (CHAT, {"messages": HELLO} | dict.fromkeys(map(str, range(70_000)), 1), "0", "0 is not a field"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(
    server: Server, path: str, body: Any, param: str | None, says: str
) -> None:
    answer = server.post(path, body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("body", [b"{", b"", b'{"prompt": "\\ud800"}', b"[" * 10_000, b"\xff"])
def test_a_body_that_is_not_json_is_refused(server: Server, body: bytes) -> None:
    answer = server.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, "not JSON" in answer.json()["error"]["message"]) == (400, True)


def test_a_form_is_no_request_and_a_wrong_path_no_endpoint(server: Server) -> None:
    answer = server.http.post(
        COMPLETIONS, content=b'{"prompt": "x"}'
    )  # as a page of another site could send it
    assert answer.status_code == 415
    assert server.http.get("/v1/nothing").status_code == 404
    assert server.http.get(COMPLETIONS).status_code == 405
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"


def test_a_large_body_is_refused_before_it_is_read(server: Server) -> None:
    most = (1 << 20) + 64 * 512
    answer = server.http.post(
        COMPLETIONS, content=b" " * (most + 1), headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, str(most) in answer.json()["error"]["message"]) == (413, True)
    parts = (b" " * 65536 for _ in range(20))  # chunked, without a length
    answer = server.http.post(COMPLETIONS, content=parts, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_requests_have_ids_in_answers_and_in_the_log(server: Server) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **{"X-Request-Id": "mine-1"})
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", "cmpl-mine-1")
    assert (
        len(server.post(COMPLETIONS, {"prompt": "x"}, **{"X-Request-Id": "a b"}).headers["x-request-id"])
        == 32
    )
    server.http.get("/a%0Ab%20c")  # as one line, and with the reason
    server.until(lambda: '"GET /a%0Ab%20c HTTP/1.1" 404' in server.log)
    assert "404, GET /ab c is not an endpoint of this server" in server.log


def test_refusals_are_counted_by_reason(server: Server) -> None:
    name = 'dflash_requests_refused_total{reason="invalid_request"}'
    before = server.metric(name)
    server.post(COMPLETIONS, {"prompt": "x", "foo": 1})
    assert server.metric(name) == before + 1


def test_keys_tls_origins_and_logs(start: Callable[..., Server], tmp_path: Path) -> None:
    keys, cert, key = (tmp_path / name for name in ("keys", "cert.pem", "key.pem"))
    keys.write_text("secret-1\nsecret-2\n")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    server = start(
        f"--api-key-file={keys}", f"--tls-cert={cert}", f"--tls-key={key}", "--cors-origin=https://a.example",
        "--served-model-name=mine", "--grace=600", DFLASH_TRT_API_KEY="secret-3",
    )  # fmt: skip
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/v1/models", headers={"Authorization": "Bearer secret-4"}).status_code == 401
    assert server.http.get("/health").status_code == 200
    for number in (1, 2, 3):
        answer = server.http.get("/v1/models", headers={"Authorization": f"Bearer secret-{number}"})
        assert answer.json()["data"][0]["id"] == "mine"
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = server.http.options(
        "/v1/completions", headers=asked
    )  # a browser sends no key with this question
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    others = server.http.options("/v1/completions", headers=asked | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in others.headers
    mine = {"Origin": "https://a.example", "Authorization": "Bearer secret-1"}
    refused = server.http.get("/v1/models", headers={"Origin": "https://a.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
    for body, status in (({"prompt": "x", "max_tokens": 1, "stream": True}, 200), ({"prompt": ""}, 400)):
        answer = server.http.post("/v1/completions", json=body, headers=mine)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
    server.until(lambda: {'HTTP/1.1" 200', 'HTTP/1.1" 401'} <= set(re.findall(r'HTTP/1.1" \d+', server.log)))
    assert "secret-" not in server.log
    assert server.stop() == 0  # the client's connection is open, and does not confirm that it ends
