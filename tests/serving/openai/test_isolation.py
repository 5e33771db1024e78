"""Clients learn nothing of each other's prompts: rows are reused by key and salt, and counted for their owners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.serving.openai.server import ServerSettings
from tests.serving.openai.conftest import COMPLETIONS, OPTIONS, Server

PROMPT = list(range(40, 90))
CHAT = {"messages": [{"role": "user", "content": "what is in the report?"}], "max_tokens": 2}


def reused(server: Server, key: str = "any", prompt: Any = PROMPT, **more: Any) -> tuple[int, int]:
    """How many of a prompt's tokens the engine did not read, and how many the client is told of; -1: not told."""
    before = server.metric("dflash_prompt_tokens_cached_total")
    body = {"prompt": prompt, "max_tokens": 2, **more}
    answer = server.post(COMPLETIONS, body, Authorization=f"Bearer {key}")
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"].get("prompt_tokens_details", {"cached_tokens": -1})
    return int(server.metric("dflash_prompt_tokens_cached_total") - before), details["cached_tokens"]


@pytest.fixture(scope="module")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys."""
    directory = tmp_path_factory.mktemp("keys")
    (keys := directory / "keys").write_text("one\ntwo\n")
    made = Server(tiny, directory / "log", *OPTIONS, f"--api-key-file={keys}")
    yield made
    assert made.stop() == 0
    assert "one" not in made.log.split()


def test_a_key_reuses_its_own_prompts_and_no_other_s(shared: Server) -> None:
    assert [reused(shared, key) for key in ("one", "two", "one", "two")] == [
        (0, 0), (0, 0), (49, 49), (49, 49),
    ]  # fmt: skip
    guess = [*PROMPT[:30], 7, 8]
    assert reused(shared, "two", guess)[0] == 30  # its own
    longer = [*PROMPT, *PROMPT]
    assert reused(shared, "one", longer)[0] >= 49
    assert reused(shared, "two", [*longer, 7])[1] < len(longer) - 1


def test_salts_part_the_prompts_of_a_key(shared: Server) -> None:
    prompt = [*range(90, 60, -1)]
    asked = [
        ("one", "a"), ("one", "b"), ("two", "a"), ("one", None), ("one", "a"), ("two", "a"), ("one", None),
    ]  # fmt: skip
    counts = [reused(shared, key, prompt, **({"cache_salt": salt} if salt else {}))[0] for key, salt in asked]
    assert counts == [0, 0, 0, 0, 29, 29, 29]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_chats_and_responses_are_parted_too(shared: Server, path: str) -> None:
    def cached(key: str, **more: Any) -> int:
        body = {"input": path, "max_output_tokens": 2} if "responses" in path else dict(CHAT)
        answer = shared.post(path, body | more, Authorization=f"Bearer {key}")
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])

    alone = [cached(key, cache_salt=path) for key in ("one", "two", "one")]
    assert alone[:2] == [0, 0]
    assert alone[2] > 0


def test_without_several_keys_the_figure_is_not_shown(server: Server) -> None:
    assert [reused(server), reused(server)] == [(0, -1), (49, -1)]
    salted = [reused(server, cache_salt="a"), reused(server, cache_salt="a")]
    assert salted == [(0, -1), (49, -1)]
    body = {"input": "what is in the report?", "max_output_tokens": 2}
    for _ in range(2):
        usage = server.post("/v1/responses", body).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("keys", "asked", "shown"),
    [("", False, False), ("a", False, False), ("ab", False, True), ("aa", False, False), ("a", True, True)],
)
def test_the_figure_is_shown_to_clients_that_have_keys_of_their_own_or_if_the_operator_asks(
    keys: str, asked: bool, shown: bool
) -> None:
    settings = ServerSettings(bundle=Bundle(Path("x"), {}), keys=[*keys], prompt_details=asked)
    assert settings.shows_cached_tokens is shown


@pytest.mark.parametrize("salt", ["", 7])
def test_a_salt_is_a_text(server: Server, salt: Any) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1, "cache_salt": salt})
    assert answer.status_code == 400
    assert "cache_salt" in answer.json()["error"]["message"]
