"""The clients in examples/ and the curl lines of docs/serving.md, as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt import LLM, SamplingParams
from server_tests.serving import Serving

ROOT = Path(__file__).parent.parent
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def expected(bundles: dict[str, Path]) -> str:
    with LLM(bundles["tiny"], threads=1) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=24)).text


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_the_clients_print_the_completion(tiny: Serving, expected: str, stream: list[str]) -> None:
    common = (PROMPT, "--max-tokens=24")
    grpc = run(sys.executable, "examples/client.py", *common, f"--url={tiny.grpc}", *stream)
    text, _, end = grpc.rpartition("\n[")
    assert text == expected
    assert re.fullmatch(r"(length|stop); \d+% of \d+ drafted tokens accepted\]\n", end)
    url = f"--url=http://localhost:{tiny.http_port}"
    assert run(sys.executable, "examples/http_client.py", *common, url, *stream) == expected + "\n"


def test_the_async_client_prints_every_completion(tiny: Serving, expected: str) -> None:
    out = run(
        sys.executable, "examples/async_client.py", PROMPT, "x = [", "--max-tokens=24", f"--url={tiny.grpc}"
    )
    assert f"--- {PROMPT}\n{expected}\n" in out
    assert "--- x = [\n" in out


def test_the_curl_lines_work_as_printed(tiny: Serving) -> None:
    lines = re.findall(
        r"^    (curl (?:.*\\\n)*.*)$", (ROOT / "docs" / "serving.md").read_text(), re.MULTILINE
    )
    # The line with a key is for a repository of one's own.
    lines = [line for line in lines if "dflash-key" not in line]
    assert len(lines) >= 3
    for line in lines:
        line = line.replace(":8000", f":{tiny.http_port}").replace(":8002", f":{tiny.metrics_port}")
        out = run("bash", "-ec", line)
        assert '"error":' not in out
        assert re.search("text_output|dflash_|READY", out), (line, out)
