"""Every request passes this first. It gets an id, must have the key, and is limited.

Middleware of ASGI. It reads the whole body, so that the routes get complete requests only. While a request is answered
it listens for the client: one that leaves cancels its request at once, whether or not anything was sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_trt.errors import shorten
from dflash_trt.serving.openai.errors import ApiError, log_refusal

LOG = logging.getLogger("uvicorn.error")
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BODY_SECONDS = 30.0
_UNREAD_SECONDS = 2.0  # for the rest of a refused body, so that the client is still there to read the refusal
_WRITE_SECONDS = 60.0  # after which a client that reads nothing is given up


class Gate:
    """keys: one of these must come as `Authorization: Bearer KEY`; none means that anyone may come.

    With several keys, the request's state has the digest of its key as `key_digest`, which is empty otherwise.
    most: bytes of a body. observe: called for every request but the probes, with its status, and the one
    that tells how it ended: a stream may fail after status 200. hosts: the names, in lower case, that `Host` may have
    besides localhost and IP addresses; None: any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: list[str],
        most: int,
        observe: Callable[[int, int], None],
        hosts: Collection[str] | None = None,
    ) -> None:
        self.app, self.most, self.observe, self._hosts = app, most, observe, hosts
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Visit(self, scope, receive, send).run()

    def admit(self, path: str, headers: dict[bytes, bytes]) -> str:
        """The digest of the request's key, if there are several. Raises ApiError."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and not _is_known(host, self._hosts):
            raise ApiError(
                403,
                f"Host is {shorten(host, 200)}, which is not a name of this server; start it with --allowed-host "
                f"{shorten(_name(host), 200)} to accept it",
                code="unknown_host",
            )
        if not self._keys or is_open(path):
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not any(
            hmac.compare_digest(key.strip(), known) for known in self._keys
        ):
            raise ApiError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key"
            )
        return hashlib.sha256(key.strip()).hexdigest() if len(set(self._keys)) > 1 else ""


def is_open(path: str) -> bool:
    """Whether a path needs no key, and is not counted: that of a probe or of the page."""
    return path in ("/", "/health", "/ready", "/metrics", "/version") or path.startswith("/page/")


def _name(host: str) -> str:
    """The name or address in a `Host` header, in lower case: without the port, brackets, and the dot of the root."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def _is_known(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` header has one of the names, localhost, or an IP address, or is absent.

    A page whose name was made to lead here (DNS rebinding) sends that name. It cannot send an address.
    """
    name = _name(host)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost") or name in names
    return True


class _Visit:
    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self._gate, self._scope, self._receive, self._send = gate, scope, receive, send
        self._headers = dict(scope["headers"])
        sent_id = self._headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = sent_id if _ID.fullmatch(sent_id) else uuid.uuid4().hex
        self._status, self._started, self._done = 499, False, False
        self._unread = (
            b"transfer-encoding" in self._headers or self._headers.get(b"content-length", b"0") != b"0"
        )
        self._left = asyncio.Event()
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    async def run(self) -> None:
        path = self._scope["path"]
        state = self._scope.setdefault("state", {})
        state["request_id"] = self.id
        try:
            try:
                state["key_digest"] = self._gate.admit(path, self._headers)
                await self._answer(await self._body())
            except ApiError as error:
                await self._refuse(error)
            except ConnectionError:  # the client has left
                pass
            except asyncio.CancelledError:
                self._task.uncancel()
                if self._left.is_set():
                    self._status = 499
                else:
                    await self._refuse(ApiError(503, "the server is stopping"))
            except Exception as error:
                LOG.exception("request %s failed", self.id)
                await self._refuse(ApiError(500, f"the server failed: {type(error).__name__}"))
        finally:
            if not is_open(path):
                self._gate.observe(self._status, state.get("failed", self._status))

    async def _body(self) -> bytes:
        most, declared = self._gate.most, self._headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > most:
            raise ApiError(
                413, f"the body has {declared[:20].decode('latin-1')} bytes, expected at most {most}"
            )
        parts, size, more = list[bytes](), 0, True
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise ApiError(413, f"the body has over {most} bytes, which is the limit")
                    more = message.get("more_body", False)
            self._unread = False
        except TimeoutError:
            raise ApiError(408, f"the body has not arrived within {_BODY_SECONDS:g} s") from None
        return b"".join(parts)

    async def _answer(self, body: bytes) -> None:
        """Run the routes. A client that leaves cancels them."""
        whole = False

        async def receive() -> Message:
            nonlocal whole
            if not whole:
                whole = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        listener = asyncio.create_task(self._listen())
        try:
            await self._gate.app(self._scope, receive, self._answered)
        finally:
            listener.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._done:
            self._leave()

    def _leave(self) -> None:
        """Cancel the request: the client has left, or reads nothing."""
        if not self._left.is_set():
            self._left.set()
            self._task.cancel()

    async def _answered(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started, self._status = True, message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.id.encode("latin-1"))]
        elif not message.get("more_body", False):
            self._done = True
        # asyncio.timeout takes two to four times as long, for every chunk of a stream.
        late = self._task.get_loop().call_later(_WRITE_SECONDS, self._leave)
        try:
            await self._send(message)
        finally:
            late.cancel()

    async def _refuse(self, error: ApiError) -> None:
        log_refusal(error, self.id)
        if self._started:
            self._scope["state"]["failed"] = error.status
            return
        body = json.dumps(error.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers()}
        if self._unread:
            headers["connection"] = "close"
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._answered({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self._answered({"type": "http.response.body", "body": body, "more_body": self._unread})
        if not self._unread:
            return
        with suppress(TimeoutError):  # closing at once would reset the connection, and lose the refusal
            async with asyncio.timeout(_UNREAD_SECONDS):
                while (await self._receive()).get("more_body"):
                    pass
        await self._answered({"type": "http.response.body", "body": b""})
