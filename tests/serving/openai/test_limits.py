"""Limits of what a client may cost, and prefixes that clients with keys of their own do not share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from build_scripts.harness import resident_of
from dflash_trt.serving.openai.engine import QueueFullError
from dflash_trt.serving.openai.server import allowed_hosts
from dflash_trt.serving.openai.settings import ServerSettings
from tests.serving.openai.conftest import COMPLETIONS, OPTIONS, Server
from tests.serving.openai.test_operations import MESSAGE, last, running


def test_trailers_without_end_after_a_refusal_take_no_memory(shared: Server) -> None:
    server = shared
    before, sent = resident_of(server.process.pid), 0
    piece = b"x: " + b"y" * 8000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        )
        with contextlib.suppress(ConnectionError):
            while sent < 300 << 20:
                connection.sendall(piece)
                sent += len(piece)
    assert sent < 100 << 20
    assert resident_of(server.process.pid) - before < 32  # MB
    server.until(lambda: " 401" in server.log)


def test_samples_count_as_requests_in_flight(tiny: Path) -> None:
    """The engine of `running` takes 4 at once."""

    async def run() -> None:
        async with running(tiny, []) as engine:
            params = {"max_tokens": 3, "temperature": 1.0, "seed": 5}
            message = {"params": params, "n": 3}
            three = asyncio.create_task(last(engine, **message))
            await asyncio.sleep(0)
            assert engine.in_flight == 3
            with pytest.raises(QueueFullError, match="3 requests are in flight, and the limit is 4"):
                await last(engine, n=2)
            assert (await last(engine))["finish_reason"] == "length"
            assert (await three)["finish_reason"] == "length"
            assert engine.in_flight == 0
            samples = {}
            async for index, update in engine.updates(MESSAGE | message, [[5, 6]]):
                samples[index] = update["token_ids"]
            for sample, ids in samples.items():
                alone = await last(engine, params=params | {"seed": 5 + sample})
                assert alone["token_ids"] == ids
            assert set(samples) == {0, 1, 2}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {"127.0.0.1"}), ({"keys": ["x"]}, {"127.0.0.1"}),
        ({"host": "::1", "hosts": ["A.example"], "keys": ["x"]}, {"::1", "a.example"}),
        ({"host": "LocalHost"}, {"localhost"}), ({"host": "0.0.0.0"}, {"0.0.0.0"}),
        ({"host": "0.0.0.0", "hosts": ["box."]}, {"0.0.0.0", "box"}), ({"host": "0.0.0.0", "keys": ["x"]}, None),
        ({"host": "box.example", "keys": ["x"], "hosts": ["b"]}, None), ({"hosts": ["*"]}, None),
    ],
)  # fmt: skip
def test_names_matter_on_loopback_and_without_keys(settings: dict[str, Any], names: set[str] | None) -> None:
    assert allowed_hosts(ServerSettings(**settings)) == names


def test_a_page_whose_name_leads_here_is_refused(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for path in ("/", "/health", "/metrics", "/v1/models"):
        answer = server.http.get(path, headers={"Host": f"evil.example:{server.port}"})
        assert answer.status_code == 403
        assert "start it with --allowed-host evil.example" in answer.json()["error"]["message"]
    assert server.post(COMPLETIONS, body, Host="evil.example").status_code == 403
    for host in ("localhost", f"LOCALHOST:{server.port}", f"[::1]:{server.port}", "192.0.2.1"):
        assert server.post(COMPLETIONS, body, Host=host).status_code == 200


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
    keys, asked, shown
) -> None:
    settings = ServerSettings(keys=[*keys], prompt_details=asked)
    assert settings.shows_cached_tokens is shown
