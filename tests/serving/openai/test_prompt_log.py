"""--log-prompts: what is kept is a prompt file, and nothing else is kept."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import DFlashError
from dflash_trt.prompts import read_prompts
from dflash_trt.serving.openai import app
from dflash_trt.serving.openai.app import PromptLog
from dflash_trt.serving.openai.protocol import ChatRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def chat(content: Any, **more: Any) -> ChatRequest:
    return ChatRequest(model="tiny", messages=[{"role": "user", "content": content, "name": "Ada"}], **more)


def test_chats_of_text_become_a_prompt_file_that_only_its_user_reads(tmp_path: Path) -> None:
    file, said = tmp_path / "kept.jsonl", list[str]()
    log = PromptLog(file, said.append)
    log.add(chat("One\n\u2028 two"), "a")
    log.add(chat("Three", chat_template_kwargs={"enable_thinking": False}, temperature=0), "b")
    log.add(chat("With a tool", tools=[TOOL]), "c")
    log.add(chat([{"type": "text", "text": "parts"}]), "d")
    PromptLog(file, said.append).add(chat("After a restart"), "e")
    prompts = read_prompts(file, 0)
    assert [prompt.id for prompt in prompts] == ["a", "b", "e"]
    assert prompts[0].content == [{"role": "user", "content": "One\n\u2028 two"}]
    assert prompts[1].variables == {"enable_thinking": False}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert said == []


def test_a_full_file_ends_the_log_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_BYTES", 200)
    file, said = tmp_path / "kept.jsonl", list[str]()
    log = PromptLog(file, said.append)
    for number in range(5):
        log.add(chat("A question of some length"), str(number))
    assert len(said) == 1
    assert file.stat().st_size <= 200
    assert [prompt.id for prompt in read_prompts(file, 0)] == ["0"]
    with pytest.raises(DFlashError, match="--log-prompts"):
        PromptLog(tmp_path / "missing" / "kept.jsonl", said.append)
