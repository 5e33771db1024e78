"""Clients that people use get from the server what `LLM` gives in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from client_tests.conftest import ENVIRONMENTS, FOLDER, Run, environment, printed
from dflash_trt import LLM, SamplingParams
from dflash_trt.serving.openai.channels import Channels
from dflash_trt.serving.openai.parsing import AnswerPart, Stage
from dflash_trt.text.tokenizer import Tokenizer
from tests.serving.openai.conftest import Server

GPT_OSS = FOLDER.parent / "dflash_trt" / "shipped" / "tiny-gpt-oss" / "target"
QUESTION = [{"role": "user", "content": "What should I eat in Borvik?"}]


def expected(llm: LLM) -> tuple[str, int, str]:
    """Text, number of tokens and finish reason of the answer that the clients ask for."""
    answer = llm.chat(QUESTION, SamplingParams(max_tokens=40))
    return answer.text, len(answer.token_ids), str(answer.finish_reason)


def test_langchain(client: Run, llm: LLM) -> None:
    answers = client("langchain")
    text, tokens, reason = expected(llm)
    assert (answers["whole"], answers["tokens"], answers["reason"]) == (text, tokens, reason)
    assert "".join(answers["chunks"]) == text
    assert sum(map(bool, answers["chunks"])) > 1
    assert answers["streamed_tokens"] == tokens
    assert answers["several"] == [text] * 3
    (call,) = answers["calls"]
    assert call["name"] == "convert_money"
    assert isinstance(call["args"]["amount"], int)
    assert list(call["args"]) == ["amount"]
    (weather,) = answers["any"]
    assert (weather["name"], list(weather["args"])) == ("get_weather", ["city"])
    assert set(answers["trip"]) == {"city", "days"}
    assert answers["completion"] == llm.generate("x = [", SamplingParams(max_tokens=12)).text


def test_litellm(client: Run, llm: LLM) -> None:
    answers = client("litellm")
    text, tokens, reason = expected(llm)
    assert (answers["whole"], answers["tokens"], answers["reason"]) == (text, tokens, reason)
    assert "".join(answers["chunks"]) == answers["later"] == text
    (call,) = answers["calls"]
    assert call["name"] == "convert_money"
    assert isinstance(json.loads(call["arguments"])["amount"], int)
    assert list(answers["trip"]) == ["city"]
    assert answers["completion"] == llm.generate("x = [", SamplingParams(max_tokens=12)).text
    assert "this server has tiny" in answers["refused"]
    (called,) = answers["loop"]
    assert (called["name"], json.loads(called["arguments"])["amount"]) == ("convert_money", 130)
    assert answers["third"] > 40
    assert answers["overflow"] == "of the large one"


def test_agents_sdk(client: Run) -> None:
    answers = client("agents")
    assert answers.pop("amounts") == [130] * 4
    for loop in answers.values():
        assert (
            loop["items"]
            == loop["streamed"]
            == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        )
        assert loop["text"] == loop["streamed_text"] != ""
    chat, response = answers.values()
    assert chat == response


def test_a_loop_as_codex_runs_it(client: Run) -> None:
    first, second = client("codex")
    ((name, arguments),) = first["calls"]
    assert (name, json.loads(arguments)["amount"]) == ("convert_money", 130)
    assert first["last"] == second["last"] == "response.completed"
    assert second["text"] or second["calls"]


def test_instructor(client: Run) -> None:
    answers = client("instructor")
    assert answers["tries"] == 4
    assert all(answers[mode]["trip"]["days"] in (1, 2, 3) for mode in ("TOOLS", "JSON_SCHEMA"))
    assert answers["TOOLS"]["prompt"] > 400  # the call and its error were sent back


def test_pydantic_ai(client: Run, llm: LLM) -> None:
    answers = client("pydantic_ai")
    text, tokens, _ = expected(llm)
    assert (answers["whole"], answers["tokens"]) == (text, tokens)
    assert "".join(answers["chunks"]) == answers["response"] == text
    assert sum(map(bool, answers["chunks"])) > 1
    for trip in (answers["by_tool"], answers["by_format"]):
        assert trip["city"] in ("Borvik", "Hestin")
        assert trip["days"] in (1, 2, 3)
    assert answers["called"][:1] == [130]


def test_node(server: Server, llm: LLM) -> None:
    modules = ENVIRONMENTS / "node" / "node_modules"
    if not modules.exists():
        pytest.skip("there is no environment of node; make clients makes it")
    out = printed("node", FOLDER / "clients" / "node.mjs", f"{server.url}/v1", modules)
    answers = json.loads(out.splitlines()[-1])
    text, tokens, reason = expected(llm)
    assert (answers["whole"], answers["tokens"], answers["reason"]) == (text, tokens, reason)
    assert "".join(answers["chunks"]) == answers["final"] == answers["response"] == text
    assert answers["streamed"] == tokens
    assert answers["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    (call,) = answers["calls"]
    assert (call["name"], list(json.loads(call["arguments"]))) == ("convert_money", ["amount"])
    assert answers["trip"] == {"city": "Borvik"}
    assert answers["refused"] == {"status": 400, "param": "max_output_tokens"}


ITEMS: list[dict[str, Any]] = [
    {"question": "What should I eat in Borvik?", "choices": [" soup", " bread and butter"], "gold": 0},
    {"question": "x = [", "choices": ["1, 2]", "def"], "gold": 0},
    {"question": "def add(a, b):", "choices": [" return a + b", " print"], "gold": 1},
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""


def test_lm_eval(client: Run, llm: LLM, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    choosing = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
    (tmp_path / "choosing.yaml").write_text(TASK.format(name="choosing", data=data) + choosing)
    writing = (
        "output_type: generate_until\ndoc_to_target: gold\n"
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12}\nmetric_list: [{metric: bypass}]\n'
    )
    (tmp_path / "writing.yaml").write_text(TASK.format(name="writing", data=data) + writing)
    answers = client("lm_eval", str(tiny), str(tmp_path))
    right = 0
    for item, resps in zip(ITEMS, answers["choosing"], strict=True):
        sums = [log_likelihood(llm, item["question"], choice) for choice in item["choices"]]
        assert [value for value, _ in resps] == pytest.approx(sums, rel=1e-4, abs=1e-4)
        right += sums.index(max(sums)) == item["gold"]
    assert answers["accuracy"] == pytest.approx(right / len(ITEMS))
    params = SamplingParams(max_tokens=12, stop=["\n"])
    assert answers["writing"] == [llm.generate(item["question"], params).text for item in ITEMS]


def log_likelihood(llm: LLM, context: str, continuation: str) -> float:
    answer = llm.generate(context + continuation, SamplingParams(max_tokens=1, prompt_logprobs=True))
    assert answer.prompt_logprobs is not None
    start = len(llm.tokenizer.encode(context))
    return sum(value for value in answer.prompt_logprobs[start:] if value is not None)


def test_aiperf(server: Server, tiny: Path, tmp_path: Path) -> None:
    words = f"""profile --model tiny --url {server.url} --endpoint-type chat --streaming --request-count 6
        --concurrency 2 --tokenizer {tiny} --synthetic-input-tokens-mean 20 --output-tokens-mean 8
        --extra-inputs ignore_eos:true --artifact-dir {tmp_path} --ui none"""
    # Offline it takes no directory for a tokenizer. It needs no hub for one, either.
    printed(environment("aiperf") / "aiperf", *words.split(), offline=False)
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    measured = json.loads(report.read_text())
    assert measured["request_count"]["avg"] == 6
    assert measured["output_sequence_length"]["avg"] > 0
    assert 0 < measured["time_to_first_token"]["avg"] <= measured["request_latency"]["avg"]
    assert measured["spec_decode_acceptance_length"]["avg"] >= 1


MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
ANSWERS = {
    "an answer": "<|channel|>final<|message|>It is 42.<|return|>",
    "reasoning first": "<|channel|>analysis<|message|>We add.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 42.<|return|>",
    "no word of it": "<|channel|>analysis<|message|>Größe: 3 €.\n\n<|end|>"
    "<|start|>assistant<|channel|>final<|message|>日本語 🙂<|return|>",
    "a call": "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "B"}<|call|>',
    "a call without a type": '<|channel|>commentary to=functions.find<|message|>{"a": [1, 2]}<|call|>',
    "the function before the channel": "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant "
    'to=functions.get_weather<|channel|>commentary json<|message|>{"city": "B"}<|call|>',
    "words before a call": "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}<|call|>",
    "two thoughts": "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis"
    "<|message|> Two.<|end|><|start|>assistant<|channel|>final<|message|>Three.<|return|>",
    "cut": "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>final<|message|>It is",
}


def test_openai_harmony_finds_the_same_messages(tmp_path: Path) -> None:
    python = environment("harmony") / "python"
    lines = "".join(json.dumps(answer) + "\n" for answer in ANSWERS.values())
    out = printed(python, "-I", FOLDER / "clients" / "harmony.py", text=lines)
    tokenizer = with_all_markers(tmp_path)
    for (name, answer), messages in zip(ANSWERS.items(), json.loads(out), strict=True):
        texts, calls = {"reasoning": "", "content": ""}, []
        for message in messages:
            text = "".join(part["text"] for part in message["content"])
            if (recipient := message.get("recipient") or "").startswith("functions."):
                calls.append((recipient.removeprefix("functions."), text))
            else:
                texts["reasoning" if message["channel"] == "analysis" else "content"] += text
        parts = ours(tokenizer, answer)
        for kind, text in texts.items():
            assert "".join(part.text for part in parts if part.kind == kind) == text, name
        assert [(part.call.name, part.call.arguments) for part in parts if part.call] == calls, name


def with_all_markers(folder: Path) -> Tokenizer:
    """The tokenizer of tiny-gpt-oss with the markers of the real one, of which it has a part."""
    tokenizer = json.loads((GPT_OSS / "tokenizer.json").read_text())
    known = {token["content"] for token in tokenizer["added_tokens"]}
    first = max(tokenizer["model"]["vocab"].values()) + 1 + len(known)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for number, marker in enumerate(m for m in MARKERS if m not in known):
        tokenizer["added_tokens"].append({"id": first + number, "content": marker, **flags})
    shutil.copytree(GPT_OSS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Tokenizer(folder)


def ours(tokenizer: Tokenizer, answer: str) -> list[AnswerPart]:
    """The parts that this package finds, a token at a time."""
    channels = Channels(tokenizer, "<|start|>assistant", Stage())
    parts = list[AnswerPart]()
    for token in tokenizer.encode(answer, add_special_tokens=False):
        parts += channels.push(tokenizer.decode([token]), [token])
    return [*parts, *channels.finish()]
