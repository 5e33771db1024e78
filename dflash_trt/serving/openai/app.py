"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

import dflash_trt
from dflash_trt.errors import RequestError
from dflash_trt.serving.openai import reading
from dflash_trt.serving.openai.chat import Chat
from dflash_trt.serving.openai.completions import Completions
from dflash_trt.serving.openai.engine import EngineDownError, EngineProcess
from dflash_trt.serving.openai.errors import ApiError, from_validation, log_refusal, refused
from dflash_trt.serving.openai.generation import cache_salt, event
from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.openai.protocol import (
    ChatRequest,
    CommonFields,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
    check_values,
)
from dflash_trt.serving.openai.responses import Responses
from dflash_trt.serving.openai.server import ServerSettings

Answering = Chat | Completions
# Endpoints that answer: the fields of a request, and what makes an answer of it.
_ANSWERS: dict[str, tuple[type[CommonFields], Any]] = {
    "/v1/chat/completions": (ChatRequest, Chat.of),
    "/v1/completions": (CompletionRequest, Completions.of),
    "/v1/responses": (ResponsesRequest, Responses.respond),
}
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
B = TypeVar("B", bound=BaseModel)


def make_app(
    model: Model,
    engine: EngineProcess,
    metrics: Callable[[], Awaitable[str]],
    settings: ServerSettings,
) -> ASGIApp:
    """The API of one model. metrics: the text of /metrics."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.close()

    # Its pages of documentation load scripts from elsewhere; /openapi.json stays.
    app = FastAPI(
        title="dflash-trt", version=dflash_trt.__version__, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    _add_errors(app)
    posts = _add_answers(app, model, engine, settings)
    _add_texts(app, model)
    _add_page(app)
    _add_state(app, model, engine, metrics)
    return _Api(app, posts)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return _refusal(error, request.state.request_id)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def no_route(request: Request, error: Any) -> Response:
        text = f"{request.method} {request.url.path[:200]} is not an endpoint of this server"
        return _refusal(ApiError(error.status_code, text), request.state.request_id)


def _add_answers(
    app: FastAPI,
    model: Model,
    engine: EngineProcess,
    settings: ServerSettings,
) -> dict[str, Endpoint]:
    """The endpoints that answer requests, by path."""

    def admit(body: CommonFields) -> None:
        """Refuse what this server never takes, before work is done for it."""
        if body.priority and not settings.priorities:
            text = f"priority is {body.priority}, but this server has no priorities: start it with --allow-priority"
            raise ApiError(400, text, "priority")
        if (asked := body.answers()) > engine.limit:  # not 429: it would never fit
            text = f"the request asks for {asked} answers, but this server takes {engine.limit} at once"
            raise ApiError(400, text, "n")

    def endpoint(kind: type[CommonFields], answering: Any) -> Endpoint:
        async def answer(request: Request) -> ASGIApp:
            body = await _read(request, kind)
            admit(body)
            named = "x-request-id" not in request.headers and body.request_id
            request_id = named or str(request.state.request_id)
            made: Answering = await answering(model, body, request_id, settings.max_seconds)
            made.usage.details = settings.shows_cached_tokens
            salt = cache_salt(request.state.key_digest, body.cache_salt)
            made.prepared.request["cache_salt"] = salt
            return await _answer(made, engine)

        return answer

    posts = {}
    for path, (kind, answering) in _ANSWERS.items():
        posts[path] = endpoint(kind, answering)
        app.post(path, openapi_extra=_schema(kind), response_model=None)(posts[path])  # to be documented
    return posts


async def _answer(answering: Answering, engine: EngineProcess) -> ASGIApp:
    if not answering.body.stream:
        return _Whole(await answering.whole(engine))
    chunks = answering.chunks(engine)
    # The first chunk comes before the status, so that a refusal is a status and no event.
    first = await anext(chunks)
    return _Events(first, chunks, answering)


def _add_texts(app: FastAPI, model: Model) -> None:
    """Texts as tokens, and tokens as texts."""

    @app.post("/tokenize", openapi_extra=_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await _read(request, TokenizeRequest)
        model.check_name(body.model)
        if (body.prompt is None) == (not body.messages):
            raise ApiError(400, "prompt and messages: expected one of them", "prompt")
        try:
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
        except RequestError as error:
            raise refused(error) from None
        texts = await model.token_texts(ids) if body.return_token_strs else None
        return _json(
            {"count": len(ids), "max_model_len": model.max_seq_len, "tokens": ids, "token_strs": texts}
        )

    @app.post("/detokenize", openapi_extra=_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await _read(request, DetokenizeRequest)
        model.check_name(body.model)
        try:
            return _json({"prompt": await model.decode(body.tokens)})
        except RequestError as error:
            raise refused(error) from None


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_PAGE / "index.html", headers=_PAGE_HEADERS)

    @app.get("/page/{name}", include_in_schema=False)
    async def part_of_page(name: str) -> Response:
        if name not in ("page.css", "page.js", "markdown.js"):
            raise ApiError(404, f"/page/{name[:100]} is not an endpoint of this server")
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


def _add_state(
    app: FastAPI, model: Model, engine: EngineProcess, metrics: Callable[[], Awaitable[str]]
) -> None:
    """What the server has, and how it is."""

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_card(model)]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        model.check_name(name)
        return _json(_card(model))

    @app.get("/health")
    async def health() -> Response:
        """Whether this process works. It starts a dead engine again by itself, so it need not be restarted then."""
        if engine.replaced:
            raise ApiError(503, "the bundle was replaced; start the server again", code="bundle_replaced")
        return _json({"status": "ok", "engine": "serving" if engine.serves else "starting"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether a request would be taken up: the engine lives and answers."""
        if engine.draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        try:
            await engine.metrics()
        except EngineDownError as error:
            raise ApiError(503, str(error), code="engine_down") from None
        return _json({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": dflash_trt.__version__})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return PlainTextResponse(await metrics(), media_type="text/plain; version=0.0.4")


class _Api:
    """The endpoints with a body, and FastAPI for the others.

    FastAPI's and Starlette's layers would take time of every request and of every chunk.
    """

    def __init__(self, others: ASGIApp, posts: dict[str, Endpoint]) -> None:
        self._others, self._posts = others, posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._posts:
            await self._others(scope, receive, send)
            return
        response: ASGIApp
        try:
            response = await self._posts[scope["path"]](Request(scope, receive))
        except ApiError as error:
            response = _refusal(error, scope["state"]["request_id"])
        await response(scope, receive, send)


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
        part = list[bytes]()
        for piece in self._pieces:
            part.append(piece)
            if sum(map(len, part)) > _LONG:
                await send({"type": "http.response.body", "body": b"".join(part), "more_body": True})
                await asyncio.sleep(0)
                part.clear()
        await send({"type": "http.response.body", "body": b"".join(part), "more_body": False})


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _refusal(error: ApiError, request_id: str) -> Response:
    log_refusal(error, request_id)
    return JSONResponse(error.body(), error.status, error.headers())


async def _read(request: Request, kind: type[B]) -> B:
    """The body of a request. Raises ApiError naming the field at fault."""
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media != "application/json":  # pages of other sites can send the other types without being asked
        raise ApiError(415, f"Content-Type is {media[:100] or 'missing'}, expected application/json")
    body = await request.body()

    def parsed() -> B:
        check_values(body)
        return kind.model_validate_json(body)

    try:
        return parsed() if len(body) < _LONG else await asyncio.to_thread(parsed)
    except ValidationError as error:
        raise from_validation(error) from None


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


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


_LONG = 1 << 16  # bytes of a body from which on a thread parses it, and of the pieces of an answer
_STARTED = int(time.time())
_PAGE = Path(__file__).with_name("page")
# The page needs nothing from elsewhere, and no other page may frame it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Cache-Control": "no-cache",
}
