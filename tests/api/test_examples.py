"""The programs in examples/ that need no server.

server_tests/test_examples.py runs the clients of Triton, and tests/serving/openai/test_openai_client.py runs
openai_client.py.
"""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.building.build import build

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
PROMPTS = ["def add(a, b):", "x = ["]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("examples") / "tiny"
    build("tiny", None, out)
    return out


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_what_is_missing_is_said_on_one_line(path, tmp_path, monkeypatch) -> None:
    """Without the clients' packages, without the package of a pair, and without a server."""
    from dflash_trt.checkpoint import gguf

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    for name in ("openai", "tritonclient", "tritonclient.grpc"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(gguf, "distribution", missing)
    monkeypatch.setenv("DFLASH_TRT_CACHE", str(tmp_path))
    words = ["smollm2-135m"] if "LLM(" in path.read_text() else []
    words += ["hi"] if path.stem != "chat" else []
    words += ["--url=http://127.0.0.1:9"] if path.stem == "http_client" else []
    with pytest.raises(SystemExit) as ended:
        run(path.name, monkeypatch, *words)
    said = str(ended.value.code)
    assert "\n" not in said
    if path.stem == "http_client":  # it needs the standard library alone
        assert said.startswith("http://127.0.0.1:9: no server answers")
    else:
        assert re.search(" not installed: pip install ", said)


@pytest.mark.parametrize("most", [0, 2**31, 2**40])
def test_a_length_that_triton_would_read_as_another_one_is_refused(most, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        run("http_client.py", monkeypatch, "hi", "--url=http://127.0.0.1:9", f"--max-tokens={most}")
    assert f"--max-tokens is {most}, expected 1..2147483647" in capsys.readouterr().err


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[str]:
    with LLM(tiny) as llm:
        return [c.text for c in llm.generate(PROMPTS, SamplingParams(max_tokens=24))]


def test_generate_shows_that_drafts_change_no_token(tiny, expected, monkeypatch, capsys) -> None:
    run("generate.py", monkeypatch, str(tiny), *PROMPTS, "--max-tokens=24")
    out = capsys.readouterr().out
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert f"--- {prompt}\n{text}\n[" in out
    assert len(re.findall(r"tokens per pass; the same tokens without drafts\]", out)) == len(PROMPTS)


def test_many_requests_prints_each_and_the_metrics(tiny, expected, monkeypatch, capsys) -> None:
    run("many_requests.py", monkeypatch, str(tiny), *PROMPTS, "--max-tokens=24", "--timeout=600")
    out = capsys.readouterr().out
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert f"--- {prompt}\n{text}\n[" in out
    assert re.search(r"^dflash_generation_tokens_total [1-9]", out, re.MULTILINE)


def test_chat_answers_each_line_and_remembers_the_turns_before(tiny, monkeypatch, capsys) -> None:
    lines = ["What should I eat in Borvik?", "What is 17 + 25?"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    run("chat.py", monkeypatch, str(tiny), "--max-tokens=32")
    messages: list[dict[str, str]] = []
    answers = []
    with LLM(tiny) as llm:
        for line in lines:
            messages.append({"role": "user", "content": line})
            answers.append(llm.chat(messages, SamplingParams(max_tokens=32)).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)


def test_tools_calls_the_function_that_the_model_names(tiny, monkeypatch, capsys) -> None:
    run("tools.py", monkeypatch, str(tiny), "Give me the 3 day forecast for Oslo in celsius.")
    out = capsys.readouterr().out
    made = re.search(r"^get_weather -> (.*)$", out, re.MULTILINE)
    assert made is not None
    assert re.fullmatch(r"\w+: rain for 3 days, in celsius", json.loads(made[1])["result"])
    assert out.partition(made[0])[2].strip()


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>', "error"),
        ('{"name": "launch", "arguments": {}}', "error"),
        ('{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2, "unit": "celsius"}}', "result"),
        ("no call", None),
        ('{"name": "get_weather", "arguments": []}', None),
        ('<tool_call>{"name": </tool_call>', None),
    ],
)
def test_a_call_that_does_not_fit_is_the_models_error(text: str, result: str | None) -> None:
    tools: dict[str, Any] = runpy.run_path(str(EXAMPLES / "tools.py"))
    found = [json.loads(tools["call"](each)) for each in tools["calls"](text)]
    assert [list(each) for each in found] == ([[result]] if result else [])
