"""Refusals name the field, and have the status that clients act on."""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.serving.openai.protocol import ChatRequest
from tests.serving.openai.conftest import CHATS, COMPLETIONS, HI, RESPONSES, Server, tool

BIASES = {str(i): 1 for i in range(1025)}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALLED = [
    *HI,
    {"role": "assistant", "tool_calls": {}},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
UNKNOWN = {"type": "json_schema", "schema": {"type": "x"}}  # a schema of no type
BASES = {CHATS: {"messages": HI}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": HI}}
# It would end a process in which a thread compiles it.
DEEP = "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(4000)), 'a4000: "a"'])
# By path: the fields, and `param`. What stands behind it is also said.
REFUSED: dict[str, list[tuple[Any, str | None, *tuple[str, ...]]]] = {
    COMPLETIONS: [
        ({"foo": 1}, "foo"), ({"temperature": "hot"}, "temperature", '"hot"'), ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 4000}, "max_tokens", "max_tokens is 4000"),
        ({"seed": 2**70}, "seed", "11805"), ({"n": 0}, "n"), ({"block_length": 99}, "block_length", "99"),
        ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": 7}, "cache_salt"),
        ({"tree_nodes": 8}, "tree_nodes"), ({"suffix": "y"}, "suffix"), ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"), ({"prompt": [1, 99999]}, "prompt", "99999"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [5] * 600}, "prompt", "600", "512"), ({"prompt": "x" * 100_000}, "prompt", "100000"),
        ({"prompt": [[5], "x", None]}, "prompt[2]"), ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [5, 1.5]}, "prompt[0]"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": DEEP}}, "structured_outputs.grammar"),
        # Before anything is copied or tokenized: these prompts would be too long.
        ({"prompt": ["x" * 3000] * 300}, "n", "300"), ({"prompt": ["x" * 4000] * 3, "n": 128}, "n", "384"),
        ({"prompt": "x" * 4000, "logit_bias": BIASES}, "logit_bias", "1024"),
        ({"logit_bias": dict.fromkeys(BIASES, "x")}, "logit_bias", "1024"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        *(({"prompt": "x" * 4000, name: value}, name, "1024") for name, value in
          (("stop_token_ids", [5] * 1025), ("bad_words", ["x"] * 1025), ("stop", ["x"] * 1025))),
    ],
    CHATS: [
        ({"messages": [{"role": "user"}] * 16385}, "messages", "16384"), ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "king"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image_url"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": CALLED}, "messages[1].tool_calls"), ({"messages": HI * 300}, "messages"),
        ({"messages": [HI[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
         "messages[1].tool_calls[0].function.name"),
        ({"model": "gpt-5"}, "model", "tiny"), ({"timeout": 0}, "timeout"), ([1], None, "[1]"),
        (dict.fromkeys(map(str, range(70_000)), 1), "0"), ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"), ({"best_of": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"), ({"web_search_options": {}}, "web_search_options"),
        ({"modalities": ["text", "audio"]}, "modalities", "audio"), ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "2"}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 600}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"stop": [1]}, "stop[0]"), ({"stop": 3}, "stop[0]"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"tools": [tool({}, "a b")]}, "tools[0].function.name"), ({"tools": [{"function": 7}]}, "tools[0].function"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
    RESPONSES: [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"), ({"input": {}}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"include": [7] * 250_000}, "include[0]", "7"), ({"include": ["x"] * 1025}, "include", "1024"),
        ({"truncation": "x"}, "truncation"),
        ({"background": True}, "background"), ({"input": "x" * 100_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 600}, "max_output_tokens"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"), ({"text": {"format": UNKNOWN}}, "text.format"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "case"), [(path, case) for path, cases in REFUSED.items() for case in cases], ids=lambda _: ""
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(server: Server, path: str, case: Any, stream: bool) -> None:
    fields, param, *said = case
    body = BASES[path] | fields | ({"stream": True} if stream else {}) if isinstance(fields, dict) else fields
    answer = server.post(path, body)
    assert answer.status_code == (404 if param == "model" else 400)
    error = answer.json()["error"]
    assert error["param"] == param
    assert [each for each in said if each not in error["message"]] == []
    names = "prompt", *re.split(r"[.\[]", param or "")[:1]
    assert any(name in error["message"] for name in names)


LIMIT = "this model's maximum context length is 512 tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "says"),
    [
        (COMPLETIONS, {"prompt": [5] * 600}, "prompt", "it may have 511"),
        (COMPLETIONS, {"prompt": "x" * 100_000}, "prompt", ""), (COMPLETIONS, {"prompt": "x y " * 9000}, "prompt", ""),
        (COMPLETIONS, {"prompt": [5] * 500, "max_tokens": 13}, "max_tokens", "expected at most 12"),
        (CHATS, {"messages": HI * 300}, "messages", ""),
        (CHATS, {"messages": HI * 16_000}, "messages", ""), (CHATS, {"max_tokens": 600}, "max_tokens", "at most"),
        (CHATS, {"max_completion_tokens": 600}, "max_completion_tokens", "max_completion_tokens is 600"),
        (RESPONSES, {"input": "x" * 100_000}, "input", ""),
        (RESPONSES, {"max_output_tokens": 600}, "max_output_tokens", "max_output_tokens is 600"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt", ""),
    ],
)  # fmt: skip
def test_what_the_context_does_not_hold_is_refused_by_the_words_that_clients_look_for(
    server, path, fields, param, says, stream
) -> None:
    """They may then take a model of a longer context."""
    asked = {"stream": True} if stream and path != "/tokenize" else {}
    answer = server.post(path, BASES.get(path, {}) | fields | asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert (LIMIT in error["message"], says in error["message"]) == (True, True), error


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
    zipped = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = server.http.post(COMPLETIONS, content=gzip.compress(b'{"prompt": "x"}'), headers=zipped)
    assert (answer.status_code, "gzip" in answer.json()["error"]["message"]) == (415, True)
    assert server.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"


def test_a_path_has_its_methods_and_head_wherever_it_has_get(server: Server) -> None:
    for path in (
        "/",
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/v1/models",
        "/v1/models/tiny",
        "/page/page.js",
    ):
        asked, head = server.http.get(path), server.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == asked.headers["content-type"]
        answer = server.http.post(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    for path in (COMPLETIONS, CHATS, RESPONSES, "/tokenize"):
        answer = server.http.get(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


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
    assert r"404, GET /a\nb c is not an endpoint of this server" in server.log


def test_the_log_has_the_field_at_fault_and_none_of_its_text(server: Server) -> None:
    path, base, word = CHATS, {"messages": HI}, "confidential"
    wrong: list[Any] = [base | {name: word} for name in ChatRequest.model_fields] + [
        word,
        [word],
        base | {f"x {word}": 1},
    ]
    wrong += [base | {name: [{word: word}]} for name in ChatRequest.model_fields]
    wrong += [{"messages": [{"role": word}]}, {"messages": [{"role": "user", "content": [{"type": word}]}]}]
    for body in wrong:
        answer = server.post(path, body, **{"X-Request-Id": "ended"})
    server.post(path, base | {"temperature": word}, **{"X-Request-Id": "last"})
    server.until(lambda: "request last: 400, temperature is refused" in server.log)
    assert answer.status_code == 400
    assert word not in server.log


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
