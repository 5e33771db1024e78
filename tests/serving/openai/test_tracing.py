"""Traces: OpenTelemetry's in-memory exporter gets a span for each request, and its parts in the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from dflash_trt.bundle.manifest import Bundle
from dflash_trt.cli import main
from dflash_trt.serving.openai import tracing
from dflash_trt.serving.openai.server import ServerSettings, application

pytest.importorskip("opentelemetry.instrumentation.asgi")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"messages": [{"role": "user", "content": "What should I eat in Borvik?"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def spans(tiny: Path) -> list[Any]:
    """The spans of a chat, a stream of two choices, a refusal and a probe."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def visit() -> None:
        settings = ServerSettings(bundle=Bundle.open(tiny), engine={"threads": "1", "block_length": "8"})
        gate, engine = application(settings, print)
        await engine.start()
        try:
            transport = httpx.ASGITransport(tracing.start(gate, provider))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=60
            ) as client:
                headers = {"traceparent": PARENT, "x-request-id": "first"}
                chat = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
                stream = await client.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 2})
                refused = await client.post("/v1/chat/completions", json=CHAT | {"temperature": -1})
                ready = await client.get("/ready")
            assert [each.status_code for each in (chat, stream, refused, ready)] == [200, 200, 400, 200]
        finally:
            tracing._tracer = None
            await engine.close()

    asyncio.run(visit())
    return list(exporter.get_finished_spans())


def requests(spans: list[Any]) -> list[Any]:
    return [span for span in spans if span.name not in ("queue", "prefill", "decode")]


def parts(spans: list[Any], request: Any) -> list[Any]:
    return [span for span in spans if span.parent and span.parent.span_id == request.context.span_id]


def test_a_request_joins_the_trace_of_its_client(spans: list[Any]) -> None:
    chat, stream, refused = requests(spans)  # and none of the probe
    assert f"{chat.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{chat.parent.span_id:016x}" == PARENT.split("-")[2]
    assert chat.attributes["gen_ai.request.id"] == "first"
    assert (
        chat.attributes["gen_ai.usage.output_tokens"],
        stream.attributes["gen_ai.usage.output_tokens"],
    ) == (12, 24)
    assert chat.attributes["gen_ai.usage.input_tokens"] > 5
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert chat.attributes["gen_ai.request.model"] == "tiny"
    codes = [
        span.attributes.get("http.status_code", span.attributes.get("http.response.status_code"))
        for span in (chat, stream, refused)
    ]
    assert codes == [200, 200, 400]


def test_the_engines_parts_follow_one_another_within_the_request(spans: list[Any]) -> None:
    chat, stream, refused = requests(spans)
    assert [span.name for span in parts(spans, chat)] == ["queue", "prefill", "decode"]
    assert len(parts(spans, stream)) == 6
    assert parts(spans, refused) == []
    queue, prefill, decode = parts(spans, chat)
    assert queue.end_time == prefill.start_time <= prefill.end_time == decode.start_time <= decode.end_time
    assert chat.start_time <= queue.start_time
    assert 0 < decode.attributes["dflash.accepted_tokens"] <= decode.attributes["dflash.draft_tokens"]


def test_without_the_extra_the_option_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    assert main(["serve", str(tiny), "--otlp-endpoint", "http://127.0.0.1:4318"]) == 1
    assert "opentelemetry" in capsys.readouterr().err
