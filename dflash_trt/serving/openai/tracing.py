"""Traces by OpenTelemetry (the extra `tracing`): a span for each request, with the engine's parts of it as children.

OpenTelemetry's own instrumentation of ASGI makes the span. The header `traceparent` joins it to the client's trace. The
attributes are those of its conventions for generative AI. Without `start` nothing here has an effect.
"""

from __future__ import annotations

from typing import Any

import dflash_trt
from dflash_trt.errors import DFlashError
from dflash_trt.extras import install
from dflash_trt.serving.wire import Update

# Attribute of a span -> fact about a request.
_ATTRIBUTES = {
    "gen_ai.request.model": "model",
    "gen_ai.response.id": "id",
    "gen_ai.response.finish_reasons": "finish_reason",
    "gen_ai.usage.input_tokens": "prompt_tokens",
    "gen_ai.usage.output_tokens": "completion_tokens",
}
_PROBES = "/health,/ready,/metrics,/version,/page/"
_PARTS = ("queue", "prefill", "decode")
_tracer: Any = None


def exporting(endpoint: str) -> Any:
    """A provider that sends spans to a collector over HTTP, in batches. Raises DFlashError without the extra."""
    try:
        import opentelemetry.instrumentation.asgi  # noqa: F401
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise DFlashError(f"{error.name} is not installed; install it with: {install('tracing')}") from None
    named = {"service.name": "dflash-trt", "service.version": dflash_trt.__version__}
    resource = Resource(named).merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME goes first
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    return provider


def start(app: Any, provider: Any) -> Any:
    """The application with a span around each request but the probes."""
    global _tracer
    from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware

    _tracer = provider.get_tracer("dflash_trt", dflash_trt.__version__)
    return OpenTelemetryMiddleware(
        app, tracer_provider=provider, excluded_urls=_PROBES, exclude_spans=["receive", "send"]
    )


def describe(request_id: str, facts: dict[str, Any]) -> None:
    """Note facts about the current request in its span."""
    if _tracer is None:
        return
    from opentelemetry.trace import get_current_span

    span = get_current_span()
    span.set_attribute("gen_ai.request.id", request_id)
    for attribute, fact in _ATTRIBUTES.items():
        if facts.get(fact) is not None:
            value = facts[fact]
            span.set_attribute(attribute, [str(each) for each in value] if isinstance(value, list) else value)


def engine_parts(update: Update) -> None:
    """Spans of a choice's time in the queue, in prefill and in decoding, from its last update."""
    if _tracer is None or "times" not in update:
        return
    times = update["times"]
    for name, begin, end in zip(_PARTS, times, times[1:], strict=False):
        if end < begin:  # it ended before this part
            break
        span = _tracer.start_span(name, start_time=begin)
        if name == "decode":
            span.set_attribute("dflash.draft_tokens", update["num_draft_tokens"])
            span.set_attribute("dflash.accepted_tokens", update["num_accepted_tokens"])
        span.end(end)
