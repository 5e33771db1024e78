"""HTTP through the proxy: requests that pass, answers to clients, clients that are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from pathlib import Path

import grpc
import pytest
from aiohttp import ClientSession
from grpc import aio

from dflash_trt.errors import DFlashError
from dflash_trt.serving import proxy_http
from dflash_trt.serving.launch import ProxySettings, Sockets
from dflash_trt.serving.proxy_grpc import serve_grpc
from dflash_trt.serving.proxy_http import serve_http
from server_tests.proxied import GENERATE, INFER, MOST, Front, get, re_status, run
from server_tests.serving import free_ports


def test_what_is_open_passes_and_nothing_else(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/models/dflash"):
            assert b"200 OK" in await front.raw(get(path)), path
        for path in ("/ready", "/config", "/stats", "/versions/1/ready"):
            assert b"200 OK" in await front.raw(get(f"/v2/models/dflash{path}")), path
        assert (await front.post(b'{"text_input": "a"}'))[0] == 200
        taken = len(front.upstream.asked)
        refused = [
            ("POST", "/v2/repository/index", 403), ("POST", "/v2/repository/models/dflash/load", 403),
            ("POST", "/v2/repository/models/x%2Fload", 403), ("POST", "/v2/models/../repository/index", 403),
            ("POST", "/v2/models/dflash/../../repository/index", 403), ("POST", "//v2/repository/index", 404),
            ("POST", "/v2/systemsharedmemory/region/a/register", 403), ("GET", "/v2/cudasharedmemory/status", 403),
            ("GET", "/v2/logging", 403), ("POST", "/v2/logging", 403), ("GET", "/v2/trace/setting", 403),
            ("POST", "/v2/models/dflash/trace/setting", 403), ("POST", "/v2/models/dflash/infer", 403),
            ("POST", "/v2/models/dflash/generate/x", 403), ("POST", "/v2/models/a%20b/generate", 403),
            ("GET", "/metrics", 404), ("GET", "/", 404), ("DELETE", "/v2/models/dflash", 405),
            ("GET", GENERATE, 405), ("POST", "/v2/health/ready", 405), ("OPTIONS", "*", 404),
            ("GET", "http://elsewhere/v2/repository/index", 403), ("CONNECT", "elsewhere:80", 404),
        ]  # fmt: skip
        for method, path, status in refused:
            said = await front.raw(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            )
            assert re_status(said) in (status, 400), (method, path, said)
        assert len(front.upstream.asked) == taken
        said = await front.raw(get("/metrics"), port=front.settings.metrics_port)
        assert re_status(said) == 200
        said = await front.raw(get("/v2/health/ready"), port=front.settings.metrics_port)
        assert re_status(said) == 403

    run(tmp_path, check)


def test_requests_are_written_anew(tmp_path: Path) -> None:
    """Chunks, forwarded headers and the secret of a restricted API do not reach the server."""

    async def check(front: Front) -> None:
        body = b'{"text_input": "a"}'
        head = b"POST " + GENERATE.encode() + b"?x=1 HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n"
        head += b"Connection: close\r\nInference-Header-Content-Length: 3\r\ndflash-secret: guess\r\n\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        assert b"200 OK" in await front.raw(head + chunks + b"0\r\n\r\n")
        ((method, path, headers, got),) = front.upstream.asked
        assert (method, path, got) == ("POST", GENERATE, body)
        assert headers["Content-Length"] == str(len(body))
        assert not {"Transfer-Encoding", "Inference-Header-Content-Length", "dflash-secret"} & headers.keys()
        assert headers["Host"] == "localhost"

    run(tmp_path, check)


def test_bodies_are_bounded_and_read_before_the_server_sees_them(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        fill = b'{"text_input": "' + b"a" * MOST + b'"}'
        wrong: list[tuple[bytes, dict[str, str], int, str]] = [
            (fill, {}, 413, f"longer than {MOST} bytes"),
            (gzip.compress(b'{"text_input": "a"}'), {"Content-Encoding": "gzip"}, 415, "as it is"),
            (b"{", {}, 400, "not valid JSON"),
            (b"", {}, 400, "not valid JSON"),
            (b"[]", {}, 400, "not a JSON object"),
            (b'{"a": "\xff"}', {}, 400, "not valid JSON"),
            ('{"a": 1}'.encode("utf-16"), {}, 400, "not valid JSON"),
            (b'{"a": ' + b"[" * 9 + b"]" * 9 + b"}", {}, 400, "more than 8 levels"),
            (b'{"a": ' + b'{"b": ' * 900 + b"1" + b"}" * 901, {}, 400, "more than 8 levels"),
            (b'{"a": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", {}, 400, "not valid JSON"),
        ]
        for body, headers, status, message in wrong:
            got, answer = await front.post(body, **headers)
            assert (got, message in answer["error"]) == (status, True), (body[:60], answer)
        chunked = b"POST " + GENERATE.encode() + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        said = await front.raw(chunked + (b"1000\r\n" + b"a" * 4096 + b"\r\n") * 100)
        assert re_status(said) in (0, 413)  # 0: the connection was reset during sending
        assert await front.raw(chunked + b"1\r\nA\r\n" * 600_000) == b""  # cut off
        assert not front.upstream.asked
        assert (await front.post(fill[: MOST - 2] + b'"}'))[0] == 200

    run(tmp_path, check)


def test_malformed_requests_end_their_own_connection(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\n".encode()
        wrong = [
            b"\x00\xff\x16\x03\x01 garbage\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            head + b"Content-Length: -1\r\n\r\n",
            head + b"Content-Length: 1e9\r\n\r\n",
            head + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}",
            head + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{}",
            head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n{}\r\n",
            head + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
            head + b"".join(b"X%d: a\r\n" % n for n in range(100_000)) + b"\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            head + b"X\r\n\r\n",
            head + b" X: folded\r\n\r\n",
            head + b"X: a\x00b\r\n\r\n",
        ]
        for data in wrong:
            said = await front.raw(data)
            assert re_status(said) in (0, 400, 404, 413, 431, 501, 505), (data[:80], said[:200])
        assert not front.upstream.asked
        assert (await front.post(b"{}"))[0] == 200

    run(tmp_path, check)


def test_slow_requests_are_cut_off_and_idle_ones_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_http, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(proxy_http, "BODY_SECONDS", 1.0)

    async def check(front: Front) -> None:
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\n".encode()

        async def slow(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.settings.http_port)
            writer.write(data)

            async def dribble() -> None:
                while True:
                    await asyncio.sleep(0.2)
                    writer.write(b"X: a\r\n")

            dribbling = asyncio.create_task(dribble())
            try:
                return await reader.read()
            finally:
                dribbling.cancel()
                writer.close()

        said = await asyncio.gather(slow(b""), slow(head), slow(head + b"Content-Length: 50000\r\n\r\n"))
        assert [re_status(s) for s in said] == [0, 0, 408]
        monkeypatch.setattr(proxy_http, "IDLE_SECONDS", 60.0)
        monkeypatch.setattr(proxy_http, "MAX_CONNECTIONS", 5)
        idle = [await asyncio.open_connection("127.0.0.1", front.settings.http_port) for _ in range(20)]
        assert (await front.post(b"{}"))[0] == 200
        closed, _ = await asyncio.wait(
            [asyncio.create_task(reader.read()) for reader, _ in idle],
            timeout=4,
            return_when="FIRST_COMPLETED",
        )
        assert closed
        for _, writer in idle:
            writer.close()

    run(tmp_path, check)


def test_events_pass_as_they_come_and_a_client_that_leaves_is_heard_of(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        async with ClientSession() as session:
            url = f"{front.url}{GENERATE}_stream"
            async with session.post(url, data=b"{}") as answer:
                assert (
                    await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
                )  # the second event is not there yet
                front.upstream.go_on.set()
                assert await answer.read() == b"data: 2\n\n"
            front.upstream.go_on.clear()
            async with session.post(url, data=b"{}") as answer:
                await answer.content.readuntil(b"\n\n")
            await session.close()
            async with asyncio.timeout(10):
                await front.upstream.left.wait()

    run(tmp_path, check)


def test_a_server_that_dies_is_an_error_and_not_a_silence(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        front.upstream.dies = True
        front.upstream.go_on.set()
        status, answer = await front.post(b"{}")
        assert (status, "it is being restarted" in answer["error"]) == (502, True)
        async with (
            ClientSession() as session,
            session.post(f"{front.url}{GENERATE}_stream", data=b"{}") as got,
        ):
            *_, last = (await got.text()).strip().split("\n\n")
            assert "it is being restarted" in json.loads(last.removeprefix("data: "))["error"]

    run(tmp_path, check)


def test_without_a_server_clients_are_told_to_come_again(tmp_path: Path) -> None:
    async def check(front: Front) -> None:
        async with ClientSession() as session, session.get(f"{front.url}/v2/health/ready") as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        async with aio.insecure_channel(front.grpc) as channel:
            with pytest.raises(aio.AioRpcError) as raised:
                await channel.unary_unary(INFER)(b"", timeout=20)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE

    run(tmp_path, check, up=False)


def test_a_taken_port_is_named_with_its_option(tmp_path: Path) -> None:
    for option in ("--port", "--metrics-port", "--grpc-port"):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports = dict(zip(("--port", "--grpc-port", "--metrics-port"), free_ports(3), strict=True))
            ports[option] = taken.getsockname()[1]
            settings = ProxySettings("127.0.0.1", *ports.values(), Sockets(tmp_path), MOST)

            async def start(settings: ProxySettings = settings) -> None:
                async with serve_http(settings), serve_grpc(settings):
                    pass

            with pytest.raises(DFlashError, match=f"{ports[option]}.*{option}"):
                asyncio.run(start())
