"""The endpoints."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

import dflash_trt
from dflash_trt.decoding.metrics import PREFIX
from dflash_trt.errors import DFlashError
from dflash_trt.prompts import MOST_BYTES
from dflash_trt.serving.openai import reading
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.completions import Completions
from dflash_trt.serving.openai.engine import EngineDownError, EngineProcess
from dflash_trt.serving.openai.errors import REASONS, ApiError, from_validation, log_refusal
from dflash_trt.serving.openai.generation import cache_salt, event
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import (
    Body,
    ChatRequest,
    CommonFields,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from dflash_trt.serving.openai.responses import Responses
from dflash_trt.serving.openai.settings import ServerSettings

Answering = Chat | Completions
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
B = TypeVar("B", bound=BaseModel)
# The bodies of requests, by path.
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

_LONG = 1 << 16  # bytes of a body from which on a thread parses it, and of the pieces of an answer
_STARTED = int(time.time())
_PAGE = Path(__file__).with_name("page")
# The page needs nothing from elsewhere, and no other page may frame it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-cache",
}


class ServerMetrics:
    """Counts of answers and refusals, and the state of the engine.

    The engine's counters start again at 0 with a new process, which Prometheus' `rate` expects. These do not.
    """

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._answers: dict[int, int] = {}
        self._up = 0
        self._refused = dict.fromkeys(sorted({reason for reason, _ in REASONS.values()}), 0)

    def observe(self, status: int, end: int) -> None:
        """Count one answered request. `end`: the status that tells how it ended."""
        self._answers[status] = self._answers.get(status, 0) + 1
        if end >= 400:
            self._refused[REASONS.get(end, REASONS[500])[0]] += 1

    async def text(self) -> str:
        """Prometheus' text format. A dead engine has no metrics of its own, and engine_up 0."""
        try:
            engine, up = await self._engine.metrics(), 1
        except EngineDownError:
            engine, up = "", 0
        self._up = up
        return engine + generate_latest(self).decode()

    def collect(self) -> list[Metric]:
        """The families that are this server's, for prometheus_client."""
        deaths, restarts = self._engine.deaths, self._engine.restarts
        answers = CounterMetricFamily(f"{PREFIX}http_responses", "answers, by status", labels=["status"])
        for status, count in sorted(self._answers.items()):
            answers.add_metric([str(status)], count)
        refused = CounterMetricFamily(
            f"{PREFIX}requests_refused", "requests without success, by reason", labels=["reason"]
        )
        for reason, count in self._refused.items():
            refused.add_metric([reason], count)
        return [
            GaugeMetricFamily(f"{PREFIX}engine_up", "whether the engine answers", self._up),
            CounterMetricFamily(f"{PREFIX}engine_deaths", "engine processes that died", deaths),
            CounterMetricFamily(f"{PREFIX}engine_restarts", "engine processes started again", restarts),
            answers,
            refused,
        ]


class Api:
    """The API of one model, for ASGI.

    A framework's layers would take time of every request and of every chunk, so it finds its endpoints itself.
    """

    def __init__(
        self,
        model: Model,
        engine: EngineProcess,
        metrics: ServerMetrics,
        settings: ServerSettings,
        prompts: PromptLog | None = None,
    ) -> None:
        self._prompts = prompts
        self._model, self._engine, self._metrics, self._settings = model, engine, metrics, settings
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            ("POST", "/v1/chat/completions"): partial(self._answer, ChatRequest, Chat.of),
            ("POST", "/v1/completions"): partial(self._answer, CompletionRequest, Completions.of),
            ("POST", "/v1/responses"): partial(self._answer, ResponsesRequest, Responses.respond),
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/version"): self._version,
            ("GET", "/openapi.json"): self._describe,
            ("GET", "/metrics"): self._show_metrics,
            ("GET", "/"): partial(self._page, "index.html"),
            **{("GET", f"/page/{name}"): partial(self._page, name) for name in ("page.css", "page.js", "markdown.js")},
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: ASGIApp
        try:
            response = await self._endpoint(scope["method"], scope["path"])(Request(scope, receive))
        except ApiError as error:
            log_refusal(error, scope["state"]["request_id"])
            response = JSONResponse(error.body(), error.status, error.headers())
        await response(scope, receive, send)

    def _endpoint(self, method: str, path: str) -> Endpoint:
        asked = "GET" if method == "HEAD" else method  # whose body uvicorn leaves out
        if (found := self._endpoints.get((asked, path))) is not None:
            return found
        of_model = path.startswith("/v1/models/")
        if asked == "GET" and of_model:
            return self._one_model
        known = {verb for verb, place in self._endpoints if place == path} | ({"GET"} if of_model else set())
        text = f"{method} {path[:200]} is not an endpoint of this server"
        raise ApiError(405 if known else 404, text, allow="GET, HEAD" if "GET" in known else "POST")

    async def _answer(self, kind: type[CommonFields], answering: Any, request: Request) -> ASGIApp:
        body, state, settings = await _read(request, kind), request.state, self._settings
        if body.priority and not settings.priorities:
            text = f"priority is {body.priority}, but this server has no priorities: start it with --allow-priority"
            raise ApiError(400, text, "priority")
        if (asked := body.answers()) > self._engine.limit:  # not 429: it would never fit
            text = f"the request asks for {asked} answers, but this server takes {self._engine.limit} at once"
            raise ApiError(400, text, "n")
        answer: Answering = await answering(self._model, body, str(state.request_id), settings.max_seconds)
        answer.usage.details = settings.shows_cached_tokens
        if self._prompts is not None and isinstance(body, ChatRequest):
            self._prompts.add(body, str(state.request_id))
        answer.request["cache_salt"] = cache_salt(state.key_digest, body.cache_salt)
        if not body.stream:
            return _Whole(await answer.whole(self._engine))
        chunks = answer.chunks(self._engine)
        # The first chunk comes before the status, so that a refusal is a status and no event.
        return _Events(await anext(chunks), chunks, answer)

    async def _tokenize(self, request: Request) -> Response:
        body, model = await _read(request, TokenizeRequest), self._model
        model.check_name(body.model)
        if (body.prompt is None) == (not body.messages):
            raise ApiError(400, "prompt and messages: expected one of them", "prompt")
        if body.messages is None:
            assert body.prompt is not None
            ids = await model.encode(body.prompt, special=body.add_special_tokens is not False)
        else:
            ids, *_ = await model.chat(
                partial(reading.messages, body.messages),
                reading.tools(body.tools),
                body.chat_template_kwargs or {},
                generation_prompt=body.add_generation_prompt is not False,
                special=bool(body.add_special_tokens),
            )
        return _json({"count": len(ids), "max_model_len": model.max_seq_len, "tokens": ids})

    async def _detokenize(self, request: Request) -> Response:
        body = await _read(request, DetokenizeRequest)
        self._model.check_name(body.model)
        return _json({"prompt": await self._model.decode(body.tokens)})

    async def _page(self, name: str, request: Request) -> Response:
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [_card(self._model)]})

    async def _one_model(self, request: Request) -> Response:
        self._model.check_name(request.scope["path"].removeprefix("/v1/models/"))
        return _json(_card(self._model))

    async def _health(self, request: Request) -> Response:
        """Whether this process works. It starts a dead engine again by itself, so it need not be restarted then, but
        perhaps if it cannot end an engine that hangs.
        """
        if self._engine.replaced:
            raise ApiError(503, "the bundle was replaced; start the server again", code="bundle_replaced")
        if self._engine.silence:
            raise ApiError(503, self._engine.silence, code="engine_hangs")
        return _json({"status": "ok", "engine": "serving" if self._engine.serves else "starting"})

    async def _ready(self, request: Request) -> Response:
        """Whether a request would be taken up: the engine lives and answers."""
        if self._engine.draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        try:
            await self._engine.metrics()
        except EngineDownError as error:
            raise ApiError(503, str(error), code="engine_down") from None
        return _json({"status": "ready"})

    async def _version(self, request: Request) -> Response:
        return _json({"version": dflash_trt.__version__})

    async def _describe(self, request: Request) -> Response:
        """The fields of requests, as OpenAPI describes them."""
        asked: list[tuple[type[BaseModel], JsonSchemaMode]] = [
            (kind, "validation") for kind in BODIES.values()
        ]
        kinds, more = models_json_schema(asked, ref_template="#/components/schemas/{model}")
        paths = {}
        for path, kind in BODIES.items():
            content = {"application/json": {"schema": kinds[kind, "validation"]}}
            paths[path] = {"post": {"requestBody": {"required": True, "content": content}, "responses": {}}}
        about = {"title": "dflash-trt", "version": dflash_trt.__version__}
        components = {"schemas": more["$defs"]}
        return _json({"openapi": "3.1.0", "info": about, "paths": paths, "components": components})

    async def _show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self._metrics.text(), media_type="text/plain; version=0.0.4")


class _Events:
    """A stream of server-sent events. An error in the middle is an event, too.

    The events of the end are sent as one piece.
    """

    _HEAD = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    )

    def __init__(
        self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None], answering: Answering
    ) -> None:
        self._first, self._rest, self._answering = first, rest, answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering, end, failure = self._answering, b"", None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._HEAD})
            await send({"type": "http.response.body", "body": event(self._first), "more_body": True})
            async for chunk in self._rest:
                if answering.ended:
                    end += event(chunk)
                else:
                    await send({"type": "http.response.body", "body": event(chunk), "more_body": True})
        except ApiError as error:
            log_refusal(error, answering.id)
            scope["state"]["failed"], failure = error.status, error
        finally:
            await self._rest.aclose()
        end += answering.last_event(failure)
        await send({"type": "http.response.body", "body": end, "more_body": False})


class _Whole:
    """A whole answer, in pieces of its JSON."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = str(sum(map(len, self._pieces))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        part = bytearray()
        for piece in self._pieces:
            part += piece
            if len(part) > _LONG:
                await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
                await asyncio.sleep(0)
                part.clear()
        await send({"type": "http.response.body", "body": bytes(part), "more_body": False})


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _read(request: Request, kind: type[B]) -> B:
    """The body of a request. Raises ApiError naming the field at fault."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":  # pages of other sites can send the other types without being asked
        raise ApiError(415, f"Content-Type is {media[:100] or 'missing'}, expected application/json")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding is {coding[:100]}, expected none: send the body uncompressed")
    body = await request.body()

    def parsed() -> B:
        reading.check_values(body)
        return kind.model_validate_json(body)

    try:
        return parsed() if len(body) < _LONG else await asyncio.to_thread(parsed)
    except ValidationError as error:
        raise from_validation(error) from None


def _card(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "dflash-trt",
        "root": model.bundle.manifest["target"]["name"],
        "parent": None,
        "max_model_len": model.max_seq_len,
        "block_size": model.block_size,
    }


class PromptLog:
    """A prompt file that chats of text without tools are added to, a JSON line each; only this user may read it.

    It ends where a prompt file may be no larger, or at the first error of the disk; answers go on. `say` tells that.

    Raises DFlashError if the file cannot be written.
    """

    def __init__(self, file: Path, say: Callable[[str], None]) -> None:
        try:
            self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise DFlashError(f"--log-prompts {file}: cannot be written ({error.strerror})") from None
        self._file, self._say, self._size = file, say, os.fstat(self._descriptor).st_size
        self._open = True

    def add(self, body: ChatRequest, request_id: str) -> None:
        messages = body.messages
        if body.tools or not all(
            isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages
        ):
            return
        kept = [{"role": message.get("role"), "content": message["content"]} for message in messages]
        line: dict[str, Any] = {"id": request_id, "category": "served", "messages": kept}
        if body.chat_template_kwargs:
            line["chat_template_kwargs"] = body.chat_template_kwargs
        data = json.dumps(line).encode() + b"\n"
        if self._open and self._size + len(data) > MOST_BYTES:
            self._end(f"{self._file} is full with {self._size} bytes")
        if self._open:
            try:
                self._size += os.write(self._descriptor, data)
            except OSError as error:
                self._end(f"{self._file} cannot be written ({error.strerror})")

    def _end(self, why: str) -> None:
        self._open = False
        os.close(self._descriptor)
        self._say(f"{why}: no further prompts are kept")
