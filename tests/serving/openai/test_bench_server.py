"""`dflash-trt bench --server`: loads, figures under vLLM's names, and faults."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.cli import main
from dflash_trt.errors import DFlashError
from dflash_trt.reports.benchmark import Load
from dflash_trt.reports.http_stream import LoadedServer as Client
from dflash_trt.reports.http_stream import StreamedAnswer
from dflash_trt.reports.server_load import LoadPoint, measure
from tests.serving.openai.conftest import Server

PROMPTS = [{"prompt": "x = ["}, {"messages": [{"role": "user", "content": "What should I eat in Borvik?"}]}]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return file


def test_the_counts_are_those_of_the_server(
    server: Server, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.metric("dflash_generation_tokens_total")
    words = (
        f"bench --server {server.url} --concurrency 1,3 --rate 50 --requests 6 --max-tokens 8 --ignore-eos"
    )
    svg = tmp_path / "load.svg"
    assert main([*words.split(), "--prompts", str(prompts), "--json", "--svg", str(svg)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["server"]) == ("tiny", f"{server.url}/v1")
    assert [(p["max_concurrency"], p["request_rate"]) for p in document["points"]] == [
        (1, None),
        (3, None),
        (None, 50),
    ]
    for point in document["points"]:
        assert (point["completed"], point["failed"], point["total_output_tokens"]) == (6, 0, 48)
        assert point["output_throughput"] == pytest.approx(48 / point["duration"], rel=0.01)
        assert 0 < point["median_ttft_ms"] <= point["median_e2el_ms"] <= point["p99_e2el_ms"]
        assert point["draft_acceptance_rate"] is not None
    whole = server.metric("dflash_generation_tokens_total") - before
    assert whole == 3 * 48 + 8  # the first request is not counted
    text = "".join(ElementTree.fromstring(svg.read_text()).itertext())
    assert "TTFT, ms" in text
    assert "50/s" in text


def test_a_table_has_the_figures(server: Server, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"bench --server {server.url.removeprefix('http://')}/v1/ --concurrency 2 --requests 2 --max-tokens 4"
    )
    assert main([*words.split(), "--prompts", str(prompts), "--model", "tiny"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split()[-1] for line in lines[2:]}
    assert (rows["load"], rows["answered"], rows["failed"]) == ("2", "2", "0")


def test_figures_are_vllms() -> None:
    """Two answers with known moments: E2E ends with the last event, TPOT leaves out the first token."""
    usage = {"prompt_tokens": 5, "speculation": {"draft_tokens": 4, "accepted_tokens": 3}}
    answers = [
        StreamedAnswer(10.0, [10.5, 10.6, 11.1], {**usage, "completion_tokens": 4}, status=200),
        StreamedAnswer(20.0, [20.1], {**usage, "completion_tokens": 1}, status=200),
        StreamedAnswer(30.0, status=429, error="full"),
    ]
    figures = LoadPoint(Load(2), 2.0, answers).to_dict()
    assert (figures["mean_ttft_ms"], figures["median_ttft_ms"], figures["std_ttft_ms"]) == (300, 300, 200)
    assert (figures["mean_tpot_ms"], figures["mean_itl_ms"], figures["p99_itl_ms"]) == (200, 300, 496)
    assert (figures["mean_e2el_ms"], figures["p99_e2el_ms"]) == (600, 1090)
    assert (
        figures["request_throughput"],
        figures["output_throughput"],
        figures["total_token_throughput"],
    ) == (
        1,
        2.5,
        7.5,
    )
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, {"429: full": 1})
    assert figures["draft_acceptance_rate"] == 0.75


EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
# Path -> status, body, and the end of the message.
FAULTS = {
    "/busy": (429, b'{"error": {"message": "the queue is full"}}', "the queue is full"),
    "/page": (502, b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
    "/middle": (200, EVENT + b'data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
    "/cut": (200, EVENT, "the stream ended without [DONE]"),
    "/junk": (200, EVENT + b"data: {\n\n", "JSONDecodeError"),
    "/empty": (200, b"data: [DONE]\n\n", "no event has text"),
}


@pytest.fixture(scope="module")
def faulty() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, body, _ = FAULTS.get(
                self.path.removeprefix("/v1"), (200, EVENT + b"data: [DONE]\n\n", "")
            )
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_faults_are_counted_by_their_message(faulty: str) -> None:
    paths = ["/fine", *FAULTS, "/fine"]
    (point,) = measure(Client(faulty), [(path, {}) for path in paths], [Load(1)], requests=len(paths))
    figures = point.to_dict()
    assert (figures["completed"], figures["failed"]) == (2, len(FAULTS))
    messages = list(figures["errors"])
    for message, (status, _, end) in zip(messages, FAULTS.values(), strict=True):
        assert message.startswith(f"{status}: ")
        assert end in message


def test_a_server_that_does_not_answer_is_an_error(faulty: str) -> None:
    for url, path, said in (
        (faulty, "/busy", "429: the queue is full"),
        ("http://127.0.0.1:1", "/fine", "no answer: ConnectionRefusedError"),
    ):
        with pytest.raises(DFlashError, match=said):
            list(measure(Client(url), [(path, {})], [Load(1)], requests=1))
    with pytest.raises(DFlashError, match="expected a URL"):
        Client("ftp://host")
    with pytest.raises(DFlashError, match="--model"):
        Client("127.0.0.1:1").model()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--server :1", "--server is ':1', expected a URL"),
        ("--server host --threads 2", "--threads is given with --server"),
        ("--server host bundle", "BUNDLE is given with --server"),
    ],
)
def test_wrong_words_are_errors(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
