"""The target's own answers, from a bundle and from a server."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from dflash_trt.checkpoint.catalogue import SHIPPED
from dflash_trt.cli import main
from dflash_trt.errors import RequestError
from dflash_trt.prompts import Prompt, read_prompts
from dflash_trt.text.tokenizer import Tokenizer
from dflash_trt.training.answers import read_answers, write_prompts
from dflash_trt.training.recipe import AnswerSampling
from dflash_trt.training.regenerate import regenerate_with_bundle, regenerate_with_server

TARGET = SHIPPED / "tiny" / "target"
ASKED = read_prompts(None, 10)
ASKED[0] = replace(ASKED[0], variables={"add_generation_prompt": False})


def test_answers_are_the_same_after_an_interruption_and_in_another_order(bundle, tmp_path) -> None:
    sampling, asked = AnswerSampling(12, (0.0, 0.9), 0.95), ASKED
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    regenerate_with_bundle(bundle, asked, whole, sampling, concurrency=4, threads=1)
    regenerate_with_bundle(bundle, asked[6:], parts, sampling, concurrency=1, threads=1)
    with parts.open("a", encoding="utf-8") as file:
        file.write('{"id":"cut-o')  # killed while writing
    assert len(read_answers(parts)) == 4
    regenerate_with_bundle(bundle, asked[::-1], parts, sampling, concurrency=3, threads=1)
    by_id = [sorted(read_answers(file), key=lambda answer: answer.id) for file in (whole, parts)]
    assert by_id[0] == by_id[1]
    assert len(by_id[0]) == 10
    assert {answer.temperature for answer in by_id[0]} == {0.0, 0.9}
    with pytest.raises(RequestError, match="two prompts have the id"):
        regenerate_with_bundle(bundle, [*asked, asked[3]], parts, sampling)


def test_variables_of_a_prompt_go_with_its_answer(bundle: Path, tmp_path: Path) -> None:
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    write_prompts(asked, ASKED[:2])
    assert read_prompts(asked, 0) == ASKED[:2]
    regenerate_with_bundle(bundle, read_prompts(asked, 0), out, AnswerSampling(2), concurrency=1, threads=1)
    tokenizer = Tokenizer(TARGET)
    assert [(a.prompt_ids, a.variables) for a in read_answers(out)] == [
        (prompt.token_ids(tokenizer), prompt.variables) for prompt in ASKED[:2]
    ]
    assert replace(ASKED[0], variables={}).token_ids(tokenizer) != ASKED[0].token_ids(tokenizer)


def test_a_prompt_without_room_for_an_answer_is_left_out(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    asked = [Prompt("long", "", "word " * 1023), Prompt("short", "", "def add(a, b):")]
    regenerate_with_bundle(bundle, asked, out, AnswerSampling(8), threads=1)
    assert [answer.id for answer in read_answers(out)] == ["short"]


class _SmallDisk(io.FileIO):
    """A file on a disk that has room for some more bytes."""

    room = 0

    def write(self, data: Any) -> int:
        taken = bytes(data)[: type(self).room]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        type(self).room -= len(taken)
        return super().write(taken)


@contextmanager
def small_disk(room: int) -> Iterator[None]:
    """Files that grow have room for so many bytes together."""
    opening = Path.open

    def opened(path: Path, mode: str = "r", *how: Any, **named: Any) -> Any:
        return _SmallDisk(path, mode) if mode == "ab+" else opening(path, mode, *how, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_SmallDisk, "room", room)
        patch.setattr(Path, "open", opened)
        yield


def test_answers_on_a_disk_that_fills_are_kept_and_continued(bundle, tmp_path, capsys) -> None:
    asked, out, whole = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "whole.jsonl"))
    write_prompts(asked, ASKED)
    regenerate_with_bundle(bundle, ASKED, whole, AnswerSampling(12, (0.0,)), threads=1)
    command = f"train regenerate --bundle {bundle} --prompts {asked} --out {out} --max-tokens 12 --threads 1"
    command += " --temperatures 0"
    with small_disk(whole.stat().st_size // 2):
        assert main(command.split()) == 1
    message = capsys.readouterr().err
    assert f"{out}: the disk is full" in message
    assert "the same command continues" in message
    kept = out.read_bytes()
    assert kept.endswith(b"\n")
    assert 0 < len(read_answers(out)) < len(ASKED)
    assert main(command.split()) == 0
    assert out.read_bytes().startswith(kept)
    assert sorted(out.read_text().splitlines()) == sorted(whole.read_text().splitlines())


class _Server(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, Any]]] = []
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        reason = "stop" if len(self.asked) % 2 else "length"
        text = f"answer to {body['messages'][-1]['content']}"
        content = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": reason}]}).encode()
        if type(self).status != 200:
            content = b"no such model"
        self.send_response(type(self).status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_answers_of_a_server_become_tokens_of_the_target(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_Server, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    Thread(target=server.serve_forever, daemon=True).start()
    url, out, tokenizer = f"http://127.0.0.1:{server.server_port}/v1", tmp_path / "a.jsonl", Tokenizer(TARGET)
    try:
        arguments = (url, "tiny", TARGET, ASKED[:4], out, AnswerSampling(16, (0.5,)))
        regenerate_with_server(*arguments, concurrency=1)
        regenerate_with_server(*arguments, concurrency=1)  # all are answered
        monkeypatch.setattr(_Server, "status", 404)
        with pytest.raises(RequestError, match=r"404 .*no such model"):
            regenerate_with_server(*arguments[:3], ASKED[:5], *arguments[4:])
    finally:
        server.shutdown()
        server.server_close()
    found = read_answers(out)
    assert len(found) == 4
    for number, (answer, prompt) in enumerate(zip(found, ASKED, strict=False)):
        assert not isinstance(prompt.content, str)
        ended = number % 2 == 0
        assert (answer.answer_ids[-1] == 2) == ended
        assert tokenizer.decode(answer.answer_ids) == f"answer to {prompt.content[-1]['content']}"
        rendered = tokenizer.apply_chat_template(prompt.content, **prompt.variables)
        assert answer.prompt_ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert [body.get("chat_template_kwargs") for body in _Server.asked[:2]] == [ASKED[0].variables, None]
    with pytest.raises(RequestError, match="gave no answer"):
        regenerate_with_server(*arguments[:3], ASKED[:5], *arguments[4:], timeout=5)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt_ids":[1],"answer_ids":[]}', '{"prompt_ids":[1],"answer_ids":[-3]}']
)
def test_a_malformed_answer_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt_ids":[1],"answer_ids":[2]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"answers.jsonl:2"):
        read_answers(file)
