"""OpenAI's own client gets the tokens of `LLM`, in whole answers and in streams."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from dflash_trt import LLM, SamplingParams
from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.decoding.output import Detokenizer
from dflash_trt.decoding.sampling.structure import StructuredOutputs
from dflash_trt.serving.openai.app import BODIES
from dflash_trt.serving.openai.chat import ChatChoice
from dflash_trt.text.tokenizer import Tokenizer
from tests.serving.openai.conftest import CHATS, QUESTION, Server


def ask(server: Server, **fields: Any) -> Any:
    return server.openai.chat.completions.create(**{"model": "tiny", "messages": QUESTION, **fields})


def complete(server: Server, **fields: Any) -> Any:
    return server.openai.completions.create(**{"model": "tiny", "prompt": "x = [", **fields})


def test_the_clients_models_are_the_one_served(server: Server) -> None:
    (model,) = server.openai.models.list()
    assert model.id == "tiny"
    assert server.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has tiny"):
        server.openai.models.retrieve("other")


def test_a_chat_is_that_of_the_python_interface(server: Server, llm: LLM) -> None:
    expected = llm.chat(QUESTION, SamplingParams(max_tokens=100))
    made = ask(server, max_tokens=100)
    (choice,) = made.choices
    assert choice.message.content == expected.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", expected.finish_reason)
    assert made.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert made.usage.completion_tokens == len(expected.token_ids)
    assert made.usage.model_dump()["speculation"]["accepted_tokens"] > 0


def test_a_stream_has_the_same_text_in_many_chunks_and_the_usage_at_its_end(server: Server) -> None:
    whole = ask(server, max_tokens=60)
    chunks = list(ask(server, max_tokens=60, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(map(bool, texts)) > 3
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_take_texts_and_token_ids_several_at_a_time(server: Server, llm: LLM) -> None:
    texts = ["def add(a, b):", "x = ["]
    params = SamplingParams(max_tokens=12)
    expected = [each.text for each in llm.generate(texts, params)]
    ids = [llm.tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        made = complete(server, prompt=prompt, max_tokens=12)
        assert [choice.text for choice in made.choices] == expected
        assert [choice.index for choice in made.choices] == [0, 1]
    echoed = complete(server, prompt=texts[0], max_tokens=12, echo=True)
    assert echoed.choices[0].text == texts[0] + expected[0]
    nothing = complete(server, prompt=texts[0], max_tokens=0, echo=True)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == (texts[0], 0)


def test_samples_of_one_prompt_have_the_seeds_behind_the_first(server: Server, llm: LLM) -> None:
    params = [SamplingParams(max_tokens=16, temperature=1.0, seed=seed) for seed in (2**64 - 1, 0, 1)]
    expected = [llm.generate("x = [", each).text for each in params]
    made = complete(server, n=3, seed=2**64 - 1, temperature=1.0, max_tokens=16)
    assert [choice.text for choice in made.choices] == expected
    chunks = complete(server, n=3, seed=2**64 - 1, temperature=1.0, max_tokens=16, stream=True)
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    assert made.usage.prompt_tokens == len(llm.tokenizer.encode("x = ["))


def test_sampling_fields_reach_the_engine(server: Server, llm: LLM) -> None:
    fields = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    more = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True, "bad_words": ["the"]}
    expected = llm.chat(QUESTION, SamplingParams(max_tokens=40, **fields, **more)).text
    for extra in ({}, {"speculate": False}, {"block_length": 3}, {"tree_nodes": 0, "timeout": 60}):
        made = ask(server, max_completion_tokens=40, **fields, extra_body=more | extra)
        assert made.choices[0].message.content == expected


def test_log_probabilities_are_those_of_the_python_interface(server: Server, llm: LLM) -> None:
    expected = llm.chat(QUESTION, SamplingParams(max_tokens=10, logprobs=True))
    made = ask(server, max_tokens=10, logprobs=True)
    content = made.choices[0].logprobs.content
    assert [each.logprob for each in content] == pytest.approx(expected.logprobs)
    assert "".join(each.token for each in content) == expected.text
    assert bytes(b for each in content for b in each.bytes) == expected.text.encode()
    done = complete(server, max_tokens=8, logprobs=0)
    legacy = done.choices[0].logprobs
    assert "".join(legacy.tokens) == done.choices[0].text
    text = done.choices[0].text
    at_offsets = [text[i:][: len(t)] for i, t in zip(legacy.text_offset, legacy.tokens, strict=True)]
    assert at_offsets == legacy.tokens


def test_top_and_prompt_log_probabilities_are_those_of_the_python_interface(server: Server, llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, logprobs=True, top_logprobs=3, prompt_logprobs=True)
    expected = llm.generate("def add(a, b):", params)
    made = complete(server, prompt="def add(a, b):", max_tokens=5, logprobs=3, echo=True, temperature=0)
    logprobs = made.choices[0].logprobs
    assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx([*expected.prompt_logprobs[1:], *expected.logprobs])
    assert "".join(logprobs.tokens) == made.choices[0].text
    best = llm.tokenizer.decode([expected.top_logprobs[0][0][0]], skip_special_tokens=False)
    assert logprobs.top_logprobs[len(expected.prompt_token_ids)][best] == pytest.approx(
        expected.top_logprobs[0][0][1]
    )
    chat = ask(server, max_tokens=2, logprobs=True, top_logprobs=2)
    top = chat.choices[0].logprobs.content[0].top_logprobs
    assert len(top) == 2
    assert top[0].logprob == chat.choices[0].logprobs.content[0].logprob


def test_log_probabilities_and_ranks_of_a_prompt_are_those_of_transformers(server: Server, llm: LLM) -> None:
    """In vLLM's form, whatever log-probabilities the answer has."""
    judge = AutoModelForCausalLM.from_pretrained(SHIPPED / "tiny" / "target", dtype=torch.float32)
    text = "def add(a, b): What should I eat in Borvik?"
    asked = {"prompt_logprobs": 3}
    (made,) = complete(server, prompt=text, max_tokens=2, logprobs=1, extra_body=asked).choices
    assert {len(top) for top in made.logprobs.top_logprobs} == {1}
    chat = ask(
        server, max_tokens=2, logprobs=True, n=2, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    )
    assert chat.choices[1].logprobs.content[0].top_logprobs == []
    template = llm.tokenizer.apply_chat_template(QUESTION, True)
    for prompt, listed, most in ((text, made.prompt_logprobs, 3), (template, chat.prompt_logprobs, 0)):
        ids = llm.tokenizer.encode(prompt, add_special_tokens=prompt == text)
        with torch.inference_mode():
            rows = judge(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        assert listed[0] is None
        for token, row, said in zip(ids[1:], rows, listed[1:], strict=False):
            best = {str(each) for each in row.topk(most).indices.tolist()}
            assert said.keys() == best | {str(token)}
            for each, entry in said.items():
                own = row[int(each)]
                assert entry["logprob"] == pytest.approx(own.item(), abs=1e-3)
                assert (row > own + 1e-3).sum() < entry["rank"] <= (row > own - 1e-3).sum()
                assert entry["decoded_token"] == llm.tokenizer.decode([int(each)], skip_special_tokens=False)
        assert len(listed) == len(ids)


def test_bias_least_length_and_priority_reach_the_engine(server: Server, llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, logit_bias={100: 100.0}, min_tokens=12, stop_token_ids=[101])
    more = {"min_tokens": 12, "stop_token_ids": [101], "priority": -3}
    made = complete(server, max_tokens=12, logit_bias={"100": 100.0}, extra_body=more)
    assert made.choices[0].text == llm.generate("x = [", params).text
    assert made.usage.completion_tokens == 12


def test_many_asynchronous_streams_have_the_tokens_of_one(server: Server) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=24, seed=seed, temperature=1.0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run(seeds: list[int]) -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in seeds))

    together = asyncio.run(run(list(range(8))))
    assert together == [asyncio.run(run([seed]))[0] for seed in range(8)]
    assert len(set(together)) > 4


def test_a_tool_is_called_whole_and_in_a_stream(server: Server) -> None:
    parameters = {"amount": "integer", "from": "string", "to": "string"}
    function = {
        "name": "convert_money",
        "description": "Convert an amount of money",
        "parameters": parameters,
    }
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Convert 130 euros to dollars."}],
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 80,
    }
    made = server.openai.chat.completions.create(**asked)
    (call,) = made.choices[0].message.tool_calls
    assert call.function.name == "convert_money"
    assert json.loads(call.function.arguments)["amount"] == 130
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.content is None
    chunks = list(server.openai.chat.completions.create(**asked, stream=True))
    (delta,) = (c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls)
    assert (delta.index, delta.function.name) == (0, "convert_money")
    assert delta.function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    without = server.openai.chat.completions.create(**asked, tool_choice="none")
    assert without.choices[0].message.tool_calls is None


def test_texts_become_tokens_and_back(server: Server, llm: LLM) -> None:
    made = server.post("/tokenize", {"prompt": "def add(a, b):"}).json()
    assert made["tokens"] == llm.tokenizer.encode("def add(a, b):")
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 512)
    assert server.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": "def add(a, b):"}
    assert server.post("/tokenize", {"messages": QUESTION}).json()["tokens"] == llm.chat_prompt(QUESTION)


def test_the_fields_of_requests_are_described(server: Server) -> None:
    said = server.http.get("/openapi.json").json()
    for path, kind in BODIES.items():
        schema = said["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].removeprefix("#/components/schemas/")
        assert said["components"]["schemas"][name]["properties"].keys() == kind.model_fields.keys()


def test_a_json_schema_shapes_the_answer(server: Server, llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"town": {"enum": ["Borvik", "Hestin"]}, "days": {"type": "integer", "maximum": 9}},
        "required": ["town", "days"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": schema, "strict": True}}
    for more in ({}, {"speculate": False}):
        made = ask(server, response_format=form, max_tokens=100, extra_body=more)
        trip = json.loads(made.choices[0].message.content)
        assert set(trip) == {"town", "days"}
        assert trip["town"] in ("Borvik", "Hestin")
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(json_object=True))
    made = ask(server, response_format={"type": "json_object"}, max_tokens=60)
    assert made.choices[0].message.content == llm.chat(QUESTION, params).text


def test_a_response_has_the_text_of_a_chat_whole_and_in_events(server: Server) -> None:
    whole = ask(server, max_tokens=100)
    text = whole.choices[0].message.content
    made = server.openai.responses.create(model="tiny", input=QUESTION[0]["content"], max_output_tokens=100)
    assert (made.output_text, made.status) == (text, "completed")
    assert made.usage.output_tokens == whole.usage.completion_tokens
    short = server.openai.responses.create(model="tiny", input=QUESTION, max_output_tokens=3)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with server.openai.responses.stream(model="tiny", input=QUESTION, max_output_tokens=100) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert ("".join(deltas), final.output_text) == (text, text)
    assert len(deltas) > 3


def test_rounds_show_the_accepted_drafts(server: Server) -> None:
    chunks = server.events(CHATS, messages=QUESTION, max_tokens=60, return_rounds=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    rounds = [each for choice in choices for each in choice.get("rounds", ())]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert "".join(each["drafted"] + each["copied"] + each["own"] for each in rounds) == text
    assert rounds[0]["accepted"] == 0
    assert sum(each["accepted"] for each in rounds) > 10
    assert all(each["accepted"] <= each["verified"] < 8 for each in rounds)
    assert sum(each["tokens"] for each in rounds) <= 60


def test_a_round_has_the_texts_of_the_drafter_of_the_chat_and_of_the_target() -> None:
    """Five tokens in two rounds, of which the second has one draft of the drafter and two copied ones."""
    tokenizer = Tokenizer(SHIPPED / "tiny" / "target")
    ids = tokenizer.encode("one two three four five", add_special_tokens=False)[:5]
    words = [tokenizer.decode([token]) for token in ids]
    choice = SimpleNamespace(words=Detokenizer(tokenizer.backend))
    made = ChatChoice.rounds(choice, {"token_ids": ids, "rounds": [(1, 0, 0, 0), (4, 3, 5, 2)]})
    assert made == [
        {"tokens": 1, "accepted": 0, "verified": 0, "drafted": "", "copied": "", "own": words[0]},
        {
            "tokens": 4, "accepted": 3, "verified": 5, "drafted": words[1], "copied": "".join(words[2:4]),
            "own": words[4],
        },
    ]  # fmt: skip


def test_the_example_prints_the_answer_and_the_drafts(server: Server) -> None:
    command = [sys.executable, str(Path(__file__).parents[3] / "examples" / "openai_client.py")]
    question = QUESTION[0]["content"]
    said = subprocess.run(
        [*command, question, "--max-tokens=24", f"--url={server.url}/v1"], capture_output=True, text=True
    )
    answer = ask(server, temperature=0, max_tokens=24, messages=[{"role": "user", "content": question}])
    text, _, figures = said.stdout.rpartition("\n[")
    assert (said.returncode, text) == (0, answer.choices[0].message.content), said.stderr
    assert answer.usage is not None
    assert figures.startswith(f"{answer.usage.completion_tokens} tokens; ")
    assert figures.endswith(" drafts accepted]\n")
    alone = subprocess.run(
        [*command, question, "--url=http://127.0.0.1:9/v1"], capture_output=True, text=True
    )
    assert (alone.returncode, alone.stderr.count("\n")) == (1, 1)
    assert alone.stderr.startswith("error: ")
