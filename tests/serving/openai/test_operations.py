"""Engines that hang, replaced bundles, full disks, wrong options, and the end of the grace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.building.build import build
from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.serving.openai import engine as engines
from dflash_trt.serving.openai.engine import EngineDownError, EngineProcess
from dflash_trt.serving.wire import EngineRequest, Update, refusal
from tests.api.loops import until
from tests.serving.openai.conftest import COMPLETIONS, LONG, Server, Streaming, waiting_behind

SHORT = {"prompt": "x = [", "max_tokens": 3}
MESSAGE: EngineRequest = {"params": {"max_tokens": 3, "temperature": 0.0}}


def engine_of(bundle: Path, said: list[str], **settings: Any) -> EngineProcess:
    key = Bundle.open(bundle).manifest["key"]
    return EngineProcess({"bundle": str(bundle), "threads": 1, **settings}, key=key, limit=4, say=said.append)


@contextlib.asynccontextmanager
async def running(bundle: Path, said: list[str], **settings: Any) -> AsyncIterator[EngineProcess]:
    engine = engine_of(bundle, said, **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def last(engine: EngineProcess, prompt: Sequence[int] = (5, 6), **changes: Any) -> Update:
    """The last update of a request."""
    *_, (_, update) = [given async for given in engine.updates({**MESSAGE, **changes}, [list(prompt)])]
    return update


def test_an_engine_that_hangs_is_replaced_and_its_requests_get_their_deadline(tiny, monkeypatch) -> None:
    monkeypatch.setattr(engines, "_ASK_SECONDS", 0.5)
    monkeypatch.setattr(engines, "_LATE_SECONDS", 0.2)
    said: list[str] = []

    async def run() -> None:
        async with running(tiny, said) as engine:
            assert (await last(engine))["finish_reason"] == "length"
            hanging = engine._connection and engine._connection.process.pid
            assert hanging is not None
            os.kill(hanging, signal.SIGSTOP)
            assert (await last(engine, timeout=0.1))["error"]["code"] == "DEADLINE"
            without = asyncio.create_task(last(engine))
            await until(lambda: engine.restarts == 1)
            assert (await without) == refusal("UNAVAILABLE", "the engine ended (SIGKILL)")
            assert engine._connection
            assert engine._connection.process.pid != hanging
            assert (await last(engine))["finish_reason"] == "length"
            await asyncio.gather(engine.close(), engine.close())
            with pytest.raises(EngineDownError):
                await last(engine)

    asyncio.run(run())
    assert said[0] == "the engine has not answered for 0.5 s, asked 6 times; it is killed"


def test_a_pass_that_never_ends_is_noticed_and_its_engine_replaced(tiny, hanging_on, monkeypatch) -> None:
    monkeypatch.setattr(engines, "_ASK_SECONDS", 0.5)
    said: list[str] = []

    async def run() -> None:
        async with running(tiny, said, max_step=0.2) as engine:
            assert (await last(engine))["finish_reason"] == "length"
            stuck = asyncio.create_task(last(engine, prompt=hanging_on))
            await until(lambda: engine.silence)
            assert "in one step" in engine.silence
            with pytest.raises(EngineDownError, match="in one step"):
                await engine.metrics()
            assert (await stuck) == refusal("UNAVAILABLE", "the engine ended (SIGKILL)")
            assert not engine.silence  # the server works while it starts another one
            assert engine.restarts == 0
            await until(lambda: engine.restarts == 1)
            assert (await last(engine))["finish_reason"] == "length"

    asyncio.run(run())
    assert said[0].endswith("expected at most 0.2 (--max-step), asked 6 times; it is killed")


def test_what_cannot_be_said_does_not_keep_an_engine_from_being_replaced(tiny: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("wb") as full:
        server = Server(tiny, tmp_path / "out", "--threads=1", errors=full)
    stream = Streaming(server, LONG)
    server.until(stream.begun)
    os.kill(server.engine(), signal.SIGKILL)
    assert "the engine ended (SIGKILL)" in stream.events()[-2]
    server.until(lambda: server.post(COMPLETIONS, SHORT).status_code == 200)
    assert server.metric("dflash_engine_restarts_total") == 1
    assert server.stop() == 0


def test_a_bundle_that_was_replaced_is_not_served_with_the_old_tokenizer(tiny, tmp_path, monkeypatch) -> None:
    other = build("tiny", None, tmp_path / "other", max_seq_len=256).path
    place = tmp_path / "bundle"
    place.symlink_to(tiny)
    server = Server(place, tmp_path / "log", "--threads=1")
    place.unlink()
    place.symlink_to(other)
    os.kill(server.engine(), signal.SIGKILL)
    server.until(lambda: "the bundle was replaced; start the server again" in server.log)
    server.until(lambda: server.http.get("/health").status_code == 503)
    assert server.http.get("/ready").status_code == 503
    assert server.post(COMPLETIONS, SHORT).status_code == 503
    assert server.stop() == 0


def test_requests_are_told_when_the_grace_is_over(start: Callable[..., Server]) -> None:
    server = start(
        "--block-length=1", "--threads=1", "--stream-interval=0", "--max-batch-size=1", "--grace=0"
    )
    stream, whole = waiting_behind(server, LONG)
    assert server.stop() == 0
    *_, error, done = stream.events()
    assert json.loads(error)["error"]["message"] == "the server is stopping"
    assert done == "[DONE]"
    whole.events()
    assert whole.lines[0] == "HTTP/1.1 503 Service Unavailable"
    assert json.loads(whole.lines[-1])["error"]["message"] == "the server is stopping"
    assert "Traceback" not in server.log


def test_an_engine_ends_with_its_server_while_it_loads() -> None:
    ours, theirs = socket.socketpair()
    program = (
        "import sys, time; from dflash_trt.serving import worker\n"
        "worker.AsyncLLM = lambda *_, **__: print('loading', flush=True) or time.sleep(600)\n"
        "worker.main(sys.argv[1:])"
    )
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno()), '{"bundle": "x"}'],
            pass_fds=[theirs.fileno()], stdout=subprocess.PIPE,
        )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    ours.close()
    assert process.wait(60) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--port=70000"], "--port: 70000 is not between 0 and 65535"),
        (["--grace=nan"], "--grace: nan is not between 0 and 3e8"),
        (["--max-deadline=-1"], "--max-deadline: -1.0 is not between 0 and 3e8"),
        (["--max-deadline=0"], "--max-deadline is 0, expected more"),
        (["--tls-cert=no.pem", "--tls-key=no.pem"], "--tls-cert no.pem --tls-key no.pem: "),
        (["--api-key-file=latin1"], "latin1: is not text in UTF-8 (byte 0)"),
    ],
)
def test_wrong_options_are_named_before_the_bundle_is_loaded(
    options, why, tmp_path, monkeypatch, capfd
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin1").write_bytes(b"\xe9\n")
    with contextlib.suppress(SystemExit):
        assert main(["serve", str(tmp_path / "missing"), *options]) == 1
    assert why in capfd.readouterr().err


def test_an_encrypted_key_is_refused_without_asking_for_a_password(tiny, tmp_path, capfd) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:abcdef", "-days", "1",
         "-subj", "/CN=localhost", "-keyout", key, "-out", cert], check=True, capture_output=True,
    )  # fmt: skip
    assert main(["serve", str(tiny), f"--tls-cert={cert}", f"--tls-key={key}"]) == 1
    assert "the key is encrypted, expected one without a password" in capfd.readouterr().err


def test_a_file_of_keys_from_windows_is_read(tmp_path: Path) -> None:
    from dflash_trt.cli.serve import read_keys

    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfsecret-1\r\nsecret-2\r\n")
    assert read_keys(file) == ["secret-1", "secret-2"]


@pytest.mark.parametrize(
    ("host", "told"),
    [("127.0.0.1", False), ("127.0.0.2", False), ("::1", False), ("localhost", False), ("0.0.0.0", True),
     ("::", True), ("10.1.2.3", True), ("gpu-node", True)],
)  # fmt: skip
def test_who_serves_more_than_its_own_machine_is_told(host, told, capfd) -> None:
    from dflash_trt.cli.serve import say_who_may_come

    say_who_may_come(host, "there is no key")
    assert (f"anyone who reaches {host} may use the model: there is no key" in capfd.readouterr().err) == told
