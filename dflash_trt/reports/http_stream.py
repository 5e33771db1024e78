"""One streamed answer of a server of OpenAI's API, with the moment of each event. The standard library is enough."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from dflash_trt.errors import DFlashError, UsageError, quoted, shorten

# Longer than any server keeps a request.
_SECONDS = 600.0
_BODY_BYTES = 1 << 20


@dataclass
class StreamedAnswer:
    """One request: when it began, and the moments of its events with text, in seconds of `perf_counter`.

    status: HTTP's, or 0 where no answer came. error: the server's message, or the fault of the connection.
    """

    begun: float
    moments: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    status: int = 0
    error: str | None = None

    @property
    def tokens(self) -> int:
        """The server's count of generated tokens, or else of events."""
        return int(self.usage.get("completion_tokens") or len(self.moments))

    @property
    def ok(self) -> bool:
        """Whether text came, and no error."""
        return self.error is None and bool(self.moments)


class LoadedServer:
    """A server by its URL, with or without /v1. Connections are kept and reused by any thread.

    Raises DFlashError for a URL that is none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--server is {quoted(url)}, expected a URL like http://127.0.0.1:8000")
        try:
            self._address = (parts.hostname, parts.port)
        except ValueError as error:
            raise UsageError(f"--server is {quoted(url)}: {error}") from None
        self._tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self._path}"
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def model(self) -> str:
        """The first model's name. Raises DFlashError if the server gives none."""
        try:
            _, answer = self._send("GET", "/models", None)
            body = answer.read(_BODY_BYTES)
            answer.close()
            if answer.status == 200:
                return str(json.loads(body)["data"][0]["id"])
            reason = _message(body, answer.status)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise DFlashError(f"{self.url}/models gives no model: {reason}; name one with --model")

    def stream(self, path: str, body: dict[str, Any]) -> StreamedAnswer:
        """Send a request, and read its events to the end. Faults are in the answer."""
        text = json.dumps(body).encode()
        answer = StreamedAnswer(perf_counter())
        try:
            connection, response = self._send("POST", path, text)
            answer.status = response.status
            if response.status != 200:
                answer.error = _message(response.read(_BODY_BYTES), response.status)
            elif not self._read(response, answer) and answer.error is None:
                answer.error = "the stream ended without [DONE]"
            if answer.error is None:
                self._keep(connection, response)
            else:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            answer.error = f"{type(error).__name__}: {error}"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            answer.error = f"an event cannot be read: {type(error).__name__}: {error}"
        return answer

    def _send(
        self, method: str, path: str, text: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:  # the server may have closed it meanwhile
            try:
                connection.request(method, self._path + path, text, self._headers)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException):
                connection.close()
        connection = self._connect()
        connection.request(method, self._path + path, text, self._headers)
        return connection, connection.getresponse()

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._address
        if self._tls:
            return http.client.HTTPSConnection(
                host, port, timeout=_SECONDS, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(host, port, timeout=_SECONDS)

    def _keep(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        response.read(_BODY_BYTES)  # the end of the body, after [DONE]
        if response.will_close or not response.isclosed():
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def _read(self, response: http.client.HTTPResponse, answer: StreamedAnswer) -> bool:
        """Note each event. Returns whether the stream was ended properly."""
        while line := response.readline():
            if not line.startswith(b"data:"):
                continue
            now, data = perf_counter(), line[5:].strip()
            if data == b"[DONE]":
                return True
            event = json.loads(data)
            if event.get("error"):
                answer.error = _message(data, 200)
                return False
            if event.get("usage"):
                answer.usage = event["usage"]
            if event.get("choices") and (text := _text(event["choices"][0])):
                answer.moments.append(now)
                answer.text += text
        return False


def _text(choice: dict[str, Any]) -> str:
    """Text of an event: of a completion, or a chat's content, reasoning or call."""
    if "delta" not in choice:
        return str(choice.get("text") or "")
    delta = choice["delta"]
    texts = [delta.get(name) for name in ("content", "reasoning_content", "reasoning")]
    calls = [call["function"].get("arguments") for call in delta.get("tool_calls") or ()]
    return "".join(text for text in (*texts, *calls) if text)


def _message(body: bytes, status: int) -> str:
    """The error of a body in OpenAI's form, or else its beginning."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace").strip()
    return shorten(text or http.client.responses.get(status, "no message"), 300)
