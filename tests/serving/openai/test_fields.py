"""Fields of OpenAI's and of vLLM's clients: with their meaning there, or without effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_trt import LLM, SamplingParams
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.decoding.output import Detokenizer, StopChecker
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.errors import ApiError
from dflash_trt.serving.openai.model import Model, last_end, text_until
from dflash_trt.serving.wire import refusal
from dflash_trt.serving.worker import Worker
from dflash_trt.text.tokenizer import Tokenizer
from tests.serving.openai.conftest import CHATS, COMPLETIONS, HI, QUESTION, Server, chat_of, model_of, tool

BEGUN = [*QUESTION, {"role": "assistant", "content": "You should eat "}]
GPT_OSS = Path(__file__).parents[3] / "dflash_trt" / "shipped" / "tiny-gpt-oss" / "target"


def test_a_last_message_can_be_continued(server: Server, llm: LLM) -> None:
    prompt = llm.tokenizer.apply_chat_template(BEGUN, False)
    prompt = prompt[: prompt.rindex("You should eat ") + len("You should eat ")]
    expected = llm.generate(
        llm.tokenizer.encode(prompt, add_special_tokens=False), SamplingParams(max_tokens=12)
    ).text
    asked = {"messages": BEGUN, "max_tokens": 12, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        assert server.made(CHATS, **asked, **more)["choices"][0]["message"]["content"] == expected


def test_a_message_that_the_template_trims_can_be_continued(tiny: Path) -> None:
    model = Model(Bundle.open(tiny), None)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"
    model.tokenizer.templates.sources["default"] = template
    chat = model.chat(lambda: BEGUN, [], {}, generation_prompt=False, continued=True)
    assert asyncio.run(chat)[1] == f"<user>{QUESTION[0]['content']}<end><assistant>You should eat"


def test_the_end_of_a_trimmed_message_is_found_in_time_of_its_length() -> None:
    """By one that takes hours where every place is compared with every other."""
    half = " a" * 2_000_000
    content = f"{half}bb{half}"
    chat = f"user:{half}{half}{half}\nassistant:\n{content.strip()}"
    assert text_until(f"{chat}<end>\n", content) == chat
    assert last_end(half * 3, content) == 0


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        (BEGUN, {"add_generation_prompt": True}, "continue_final_message"),
        ([*QUESTION, {"role": "assistant", "content": ""}], {}, "continue_final_message"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(server, messages, more, param) -> None:
    answer = server.post(CHATS, {"messages": messages, "continue_final_message": True, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_chat_may_lack_the_generation_prompt(server: Server, llm: LLM) -> None:
    ids = llm.tokenizer.encode(llm.tokenizer.apply_chat_template(QUESTION, False), add_special_tokens=False)
    usage = server.made(CHATS, messages=QUESTION, max_tokens=1, add_generation_prompt=False)["usage"]
    assert usage["prompt_tokens"] == len(ids)


def test_special_tokens_and_stop_strings_may_be_part_of_the_text(server: Server, llm: LLM) -> None:
    (end,) = llm.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    bias = {"prompt": "x", "logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 2}
    assert server.made(COMPLETIONS, **bias)["choices"][0]["text"] == ""
    shown = server.made(COMPLETIONS, **bias, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == "<|im_end|>" * 2
    text = server.made(CHATS, messages=QUESTION, max_tokens=40)["choices"][0]["message"]["content"]
    stop = {"messages": QUESTION, "max_tokens": 40, "stop": text[8:12]}
    whole = text[: text.index(text[8:12])]
    for include, expected in ((False, whole), (True, whole + text[8:12])):
        choice = server.made(CHATS, **stop, include_stop_str_in_output=include)["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")


def test_a_stop_string_that_the_last_token_does_not_complete_is_no_reason(tiny: Path) -> None:
    """Before the model's own end it may stand because of min_tokens."""
    model = model_of(tiny, "")
    chat, ids = chat_of(model), model.tokenizer.encode("to stop<|im_end|>", add_special_tokens=False)
    assert [chat._stop_reason(each, ["stop"], []) for each in (ids[:-1], ids)] == ["stop", None]


def test_only_allowed_tokens_come(server: Server) -> None:
    fields = {"prompt": "x", "max_tokens": 9, "allowed_token_ids": [70, 71], "temperature": 1}
    choice = server.made(COMPLETIONS, **fields, return_token_ids=True)["choices"][0]
    assert {70, 71} >= set(choice["token_ids"]) > set()


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"choice": ["yes", "no"]}, ("yes", "no")), ({"regex": "(yes|no)"}, ("yes", "no")),
        ({"grammar": 'start: "yes" | "no"\n'}, ("yes", "no")), ({"json": {"enum": ["yes", "no"]}}, ('"yes"', '"no"')),
        ({"json": '{"enum": ["yes", "no"]}'}, ('"yes"', '"no"')),
    ],
)  # fmt: skip
def test_an_answer_has_the_form_that_is_asked_for(server: Server, form: Any, texts: tuple[str, str]) -> None:
    asked = {"max_tokens": 9, "structured_outputs": form}
    assert server.made(COMPLETIONS, prompt="Well,", **asked)["choices"][0]["text"] in texts
    assert server.made(CHATS, messages=HI, **asked)["choices"][0]["message"]["content"] in texts


def test_drafts_are_counted_as_in_vllm(server: Server) -> None:
    for path, asked in ((CHATS, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "x = ["})):
        answer = server.made(path, **asked, max_tokens=40)
        drafts = answer["metrics"]["speculative_decoding"]
        ours = answer["usage"]["speculation"]
        assert drafts["num_draft_tokens"] == ours["draft_tokens"] > 0
        assert drafts["num_accepted_draft_tokens"] == ours["accepted_tokens"]
        assert path == COMPLETIONS or ours["accepted_tokens"] > 0
        counts = drafts["acceptance_histogram"]
        assert len(counts) == drafts["num_spec_tokens"] + 1
        assert sum(counts) == drafts["num_spec_steps"]
        assert sum(k * n for k, n in enumerate(counts)) == drafts["num_accepted_draft_tokens"]
        assert drafts["mean_acceptance_length"] == 1 + ours["accepted_tokens"] / drafts["num_spec_steps"]
        assert drafts["draft_acceptance_rate"] == ours["accepted_tokens"] / ours["draft_tokens"]
        chunks = server.events(path, **asked, max_tokens=40, stream_options={"include_usage": True})
        assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1]["choices"] == []
        for more in ({"n": 2}, {"speculate": False}):
            assert "metrics" not in server.made(path, **asked, max_tokens=9, **more)


def test_the_tokens_of_prompts_are_those_of_the_usages(server: Server) -> None:
    before = server.metric("dflash_prompt_tokens_total"), server.metric("dflash_generation_tokens_total")
    usages = [
        server.made(COMPLETIONS, prompt="x = [", max_tokens=3, n=3)["usage"],
        server.made(COMPLETIONS, prompt=["x = [", "def add"], max_tokens=3, n=2)["usage"],
        server.made(CHATS, messages=HI, max_tokens=3, n=2)["usage"],
        server.events(CHATS, messages=HI, max_tokens=3, stream_options={"include_usage": True})[-1]["usage"],
    ]
    for refused in ({"timeout": 1e-6}, {"max_tokens": 4000}, {"allowed_token_ids": [10**6]}):
        assert server.post(COMPLETIONS, {"prompt": "x = [", "max_tokens": 3, **refused}).status_code in (
            400,
            504,
        )
    after = server.metric("dflash_prompt_tokens_total"), server.metric("dflash_generation_tokens_total")
    assert after[0] - before[0] == sum(usage["prompt_tokens"] for usage in usages)
    assert after[1] - before[1] == sum(usage["completion_tokens"] for usage in usages)


def test_errors_have_no_path_of_the_bundle(tiny: Path) -> None:
    model = Model(Bundle.open(tiny), None)
    sources = model.tokenizer.templates.sources
    for template, says in (
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        (None, "no working chat"),
    ):
        sources.clear()
        sources.update({} if template is None else {"default": template})
        with pytest.raises(ApiError, match=says) as refused:
            chat_of(model)
        assert refused.value.status == 400
        assert str(tiny) not in refused.value.message


def test_the_engines_errors_have_no_path_of_the_bundle(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, sent = Worker.__new__(Worker), list[Any]()
    monkeypatch.setattr(worker, "_llm", SimpleNamespace(bundle=SimpleNamespace(path=tiny)), raising=False)
    monkeypatch.setattr(worker, "_send", lambda key, update: sent.append(update))
    worker._refuse(1, "INTERNAL", f"OSError: {tiny}/target/graph.onnx in {tiny}: not found")
    assert sent == [refusal("INTERNAL", "OSError: target/graph.onnx in the bundle: not found")]


def stopped_at(chat: Chat, model: Model, answer: str) -> list[str]:
    """The text of an answer whose engine stops at the chat's stop strings."""
    params = SamplingParams(**chat.request["params"] | {"max_tokens": 400})
    checker = StopChecker(params, (), Detokenizer(model.tokenizer.backend))
    given = {"reasoning": "", "content": ""}

    def take(update: Any) -> None:
        for part in chat.parts(0, update):
            given[part.kind] += part.text

    for token in model.tokenizer.encode(answer, add_special_tokens=False):
        emission = checker.push((token,))
        update: dict[str, Any] = {"text": emission.text, "token_ids": [token][: emission.kept]}
        if emission.finish_reason is not None:
            update["finish_reason"] = emission.finish_reason
        take(update)
        if emission.finish_reason is not None:
            return list(given.values())
    take({"text": checker.abandon("length"), "token_ids": [], "finish_reason": "length"})
    return list(given.values())


@pytest.mark.parametrize("stop", ["analysis", "final", "add", "assistant"])
def test_stop_strings_are_about_the_content_of_channels(tiny: Path, stop: str) -> None:
    model = gpt_oss(tiny)
    text = "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>final<|message|>It is 4"
    assert stopped_at(chat_of(model, stop=stop), model, text) == ["We add.", "It is 4"]
    assert stopped_at(chat_of(model, stop=stop), model, f"{text}2, {stop} more") == ["We add.", "It is 42, "]


def gpt_oss(tiny: Path) -> Model:
    """The bundle tiny with the tokenizer and template of gpt-oss."""
    tokenizer = Tokenizer(GPT_OSS)
    model = model_of(tiny, tokenizer.chat_source(), "<|start|>assistant")
    model.tokenizer = tokenizer
    return model


@pytest.mark.parametrize("begun", ["", "<think>"])
@pytest.mark.parametrize("stop", ["think", "thought", "\n\n"])
def test_stop_strings_are_about_what_follows_a_thought(tiny: Path, stop: str, begun: str) -> None:
    model = model_of(tiny, "<think>", f"hi{begun}")
    answer = "<think>"[len(begun) :] + f"a thought\n\n</think>An answer{stop} and more"
    assert stopped_at(chat_of(model, stop=stop), model, answer) == ["a thought\n\n", "An answer"]


def test_stop_strings_do_not_cut_calls(server: Server) -> None:
    tools = [tool({"type": "object", "properties": {"a": {"enum": ["x"]}}})]
    asked = {"messages": HI, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = server.made(CHATS, **asked, stop=["\n", "name"], max_tokens=60)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "order"


def test_thoughts_are_counted_in_usages(tiny: Path) -> None:
    model = gpt_oss(tiny)
    chat = chat_of(model)
    text = (
        "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>final<|message|>It is 42."
    )
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    update = {"text": model.tokenizer.decode(ids), "token_ids": ids, "num_input_tokens": 9}

    async def run() -> dict[str, Any]:
        async def updates(*_: Any) -> Any:
            yield 0, update

        engine: Any = SimpleNamespace(updates=updates)
        async for index, made in chat.run(engine):
            chat.parts(index, made)
        return chat.usage.to_dict()

    thought = len(model.tokenizer.encode("We add.", add_special_tokens=False))
    assert asyncio.run(run())["completion_tokens_details"] == {"reasoning_tokens": thought}
