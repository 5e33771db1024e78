"""Tokenizer and chat templates, compared with Transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dflash_trt.checkpoint.pair import check_tokenizers
from dflash_trt.errors import CheckpointError, RequestError
from dflash_trt.text import chat_template, sandbox
from dflash_trt.text.tokenizer import Tokenizer

# Similar to Qwen3's: tools, thinking, tool calls and answers, a namespace that walks the messages backwards.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not ns.found %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - loop.index0 - 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- set text = message.content if message.content is string else '' %}
        {%- if '</think>' in text and loop.index0 < ns.last %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + (call.function | tojson(indent=2)) + '</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- eos_token + '\\n' }}
    {%- elif message.role in ['user', 'tool'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Sei höflich. <b>&amp;</b>"},
    {"role": "user", "content": "你好 😀, what's the weather?"},
    {
        "role": "assistant",
        "content": "<think>\nhm\n</think>\n\nLet me look.",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "São Paulo", "unit": "°C"}}}],
    },
    {"role": "tool", "content": '{"temperature": "25°"}'},
    {"role": "user", "content": "danke"},
]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "it's <hot> & 暑い", "parameters": {}}},
]  # fmt: skip
SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL)
    tokenizer.train_from_iterator([TEMPLATE], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, chat_template=TEMPLATE)
    return tmp_path


def configure(directory: Path, **fields: Any) -> None:
    end = {"content": "<|im_end|>", "special": True}
    config = {"bos_token": "<|bos|>", "eos_token": end, "pad_token": None, "add_bos_token": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | fields), encoding="utf-8")


def transformers_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("messages", [CHAT, CHAT[1:2], CHAT[:3]])
def test_chats_render_as_in_transformers(
    directory, messages, tools, add_generation_prompt, variables
) -> None:
    tokenizer, oracle = Tokenizer(directory), transformers_tokenizer(directory)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt, tools=tools, **variables)
    settings = {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
    assert text == oracle.apply_chat_template(messages, tokenize=False, **settings)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokens == oracle.apply_chat_template(messages, **settings)["input_ids"]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_encoding_of_plain_prompts(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    prompt = "a prompt longer than eight tokens, with <|im_end|> and 漢字"
    tokens = tokenizer.encode(prompt)
    assert tokens == transformers_tokenizer(directory)(prompt)["input_ids"]
    assert tokens[0] == tokenizer.backend.token_to_id("<|bos|>")
    assert tokenizer.backend.token_to_id("<|im_end|>") in tokens
    assert tokenizer.encode(prompt, add_special_tokens=False) == tokens[1:]
    assert tokenizer.decode(tokens) == prompt.replace("<|im_end|>", "")
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("\ud800")


def test_a_long_text_lets_other_threads_run(directory: Path) -> None:
    """They run while it is tokenized only if it lets them: the interpreter takes the lock from no thread here."""
    tokenizer, text, begun = Tokenizer(directory), "ab " * 100_000, threading.Event()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        with ThreadPoolExecutor(1) as threads:
            ids = threads.submit(lambda: begun.set() or tokenizer.encode(text))
            begun.wait()
            assert not ids.done()
    finally:
        sys.setswitchinterval(interval)
    assert tokenizer.backend.encode(text).ids == ids.result()


def test_where_templates_come_from(directory: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    configure(directory, chat_template=named)
    assert Tokenizer(directory).apply_chat_template(CHAT) == "plain"
    assert Tokenizer(directory).apply_chat_template(CHAT, tools=TOOLS) == "with tools"
    (directory / "chat_template.jinja").write_text("{{ bos_token }} of the file")
    assert Tokenizer(directory).apply_chat_template(CHAT) == "<|bos|> of the file"


def test_a_template_may_ask_for_the_date(directory: Path) -> None:
    configure(directory, chat_template="{{ strftime_now('%Y') }}")
    assert int(Tokenizer(directory).apply_chat_template(CHAT)) >= 2025


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages is 'hello'"), ([], r"messages is \[\]"), ({"role": "user"}, "messages is"),
        (["hello"], r"messages\[0\] is 'hello'"), ([{"content": "x"}], r"messages\[0\].role is None"),
        ([*CHAT[:1], {"role": "user"}], r"messages\[1\].content is None"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content is 5"),
        ([{"role": "poet", "content": "x"}], "tokenizer_config.json.*unknown role poet"),
    ],
)  # fmt: skip
def test_malformed_messages_name_the_place(directory: Path, messages: Any, field: str) -> None:
    with pytest.raises(RequestError, match=field):
        Tokenizer(directory).apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% set ns = namespace(__class__=1) %}",
        "{{ cycler.__init__.__globals__ }}", "{{ dict.__base__ }}{{ 1 + [] }}",
    ],
)  # fmt: skip
def test_templates_are_confined(directory: Path, template: str) -> None:
    configure(directory, chat_template=template)
    with pytest.raises(RequestError, match="refuses the messages"):
        Tokenizer(directory).apply_chat_template(CHAT)


def test_unusable_files_are_named(directory: Path) -> None:
    for fields, message in (
        ({}, "no default chat template.*none"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, "only.*rag"),
        ({"chat_template": [1]}, r"tokenizer_config\.json.*chat_template"),
        ({"chat_template": "one\n{% if %}"}, r"tokenizer_config\.json.*line 2"),
    ):
        configure(directory, **fields)
        with pytest.raises(CheckpointError, match=message):
            Tokenizer(directory).apply_chat_template(CHAT)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*JSON"):
        Tokenizer(directory).apply_chat_template(CHAT)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*readable"):
        Tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*not found"):
        Tokenizer(directory)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
        ("{{ 10 ** (10 ** 8) }}", "more than 1 s"),
        ("{{ 'a' * 10 ** 10 }}", "more than 1024 MiB of memory"),
        ("{% for i in range(100) %}{{ 'a' * 10 ** 6 }}{% endfor %}", "more than 16777216 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ range(10 ** 9) }}", "Range too big"),
    ],
    ids=["loops", "power", "memory", "output", "recursion", "range"],
)
def test_templates_are_held_to_limits_and_the_next_one_renders(
    directory, monkeypatch, template, message
) -> None:
    limited = sandbox.Sandbox("chat_renderer", processes=1, seconds=1, memory=1 << 30)
    monkeypatch.setattr(chat_template, "_SANDBOX", limited)
    tokenizer = Tokenizer(directory)
    configure(
        directory,
        chat_template=[{"name": "default", "template": template}, {"name": "tool_use", "template": "x"}],
    )
    with pytest.raises(RequestError, match=message):
        tokenizer.apply_chat_template(CHAT)
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS) == "x"


def test_messages_of_clients_cannot_spend_more_than_the_limits(directory: Path) -> None:
    configure(directory, chat_template="{{ messages[0].content * messages[0].times }}")
    with pytest.raises(RequestError, match="refuses the messages"):
        Tokenizer(directory).apply_chat_template([{"role": "user", "content": "a", "times": 10**12}])
    with pytest.raises(RequestError, match="not JSON values"):
        Tokenizer(directory).apply_chat_template([{"role": "user", "content": "a", "times": {1}}])
    with pytest.raises(RequestError, match="given twice"):
        Tokenizer(directory).apply_chat_template(CHAT, messages=[])


def test_an_interrupted_rendering_does_not_answer_the_next(directory, monkeypatch) -> None:
    configure(directory, chat_template="{{ messages[0].content }}")
    tokenizer, read = Tokenizer(directory), sandbox._read

    def interrupted(*_: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.apply_chat_template([{"role": "user", "content": "first"}])
    monkeypatch.setattr(sandbox, "_read", read)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "second"}]) == "second"


def test_a_prepared_chat_starts_no_process(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(directory, chat_template="{{ messages[0].content }}")
    tokenizer = Tokenizer(directory)
    tokenizer.templates.prepare()
    monkeypatch.delattr(subprocess, "Popen")
    assert tokenizer.apply_chat_template(CHAT) == CHAT[0]["content"]


def test_renderings_of_many_threads_get_their_own_answers(directory: Path) -> None:
    configure(directory, chat_template="{{ messages[0].content }}")
    tokenizer = Tokenizer(directory)
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(
            lambda i: tokenizer.apply_chat_template([{"role": "user", "content": str(i)}]), range(200)
        )
    assert list(found) == [str(i) for i in range(200)]


# Tokenizers that make the library's Rust code panic, whether it reads them without complaint or not.
PANICS: list[dict[str, Any]] = [
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
]


@pytest.mark.parametrize("change", PANICS, ids=["length", "charsmap", "replace", "template"])
def test_a_tokenizer_that_panics_is_found_at_build_time(directory: Path, change: dict[str, Any]) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        Tokenizer(directory).check()
    (directory / "config.json").write_text('{"vocab_size": 400}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        check_tokenizers(directory, directory, 1)


def test_a_tokenizer_that_panics_at_a_prompt_fails_that_request(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | PANICS[0]))
    with pytest.raises(RequestError, match="the tokenizer fails on this prompt"):
        Tokenizer(directory).encode("text")
