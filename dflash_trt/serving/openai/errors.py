"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from dflash_trt.errors import RequestError, shorten, show
from dflash_trt.serving.wire import Error

_INVALID = "invalid_request_error"
# By status: why a request was refused, as a label of the metrics, and the type of the error for clients.
REASONS = {
    400: ("invalid_request", _INVALID),
    401: ("unauthorized", "authentication_error"),
    403: ("unknown_host", "permission_error"),
    404: ("not_found", "not_found_error"),
    405: ("not_found", _INVALID),
    408: ("slow_body", _INVALID),
    413: ("too_large", _INVALID),
    415: ("invalid_request", _INVALID),
    429: ("queue_full", "rate_limit_error"),
    499: ("cancelled", _INVALID),
    500: ("error", "server_error"),
    503: ("engine_down", "server_error"),
    504: ("deadline", "timeout_error"),
}
RETRY_SECONDS = 1
# Patterns of fields, and their names in the client's request.
Names = Sequence[tuple[str, str]]


class ApiError(Exception):
    """An answer other than success. `param`: the field at fault. allow: the methods of the path, for status 405."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, allow: str = ""
    ) -> None:
        super().__init__(message)
        self.allow = allow
        self.status, self.message, self.param, self.code = status, message, param, code

    def renamed(self, names: Names) -> ApiError:
        """The same error, with the names of the fields that the client sent."""
        message, param = self.message, self.param
        for pattern, name in names:
            message = re.sub(pattern, name, message)
            param = param and re.sub(pattern, name, param)
        return ApiError(self.status, message, param, self.code)

    def body(self) -> dict[str, Any]:
        kind = REASONS[self.status][1]
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Headers of the answer beside those of every answer."""
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        if self.status == 405:
            return {"Allow": self.allow}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def log_refusal(error: ApiError, request_id: str) -> None:
    """Say why a request got no answer, beside uvicorn's own line about it. Of what is wrong in a body, only the field
    is said: its value is the client's.
    """
    why = shorten(error.message, 500)
    if error.param is not None or error.status == 400:
        field = re.match(r"\w{1,40}", error.param or "", re.ASCII)
        why = f"{field[0] if field else 'the body'} is refused" + (f" ({error.code})" if error.code else "")
    logging.getLogger("uvicorn.error").info("request %s: %d, %s", request_id, error.status, why)


def from_engine(error: Error) -> ApiError:
    """The error that the engine answered a request with."""
    statuses = {"INVALID_ARG": 400, "BUSY": 429, "UNAVAILABLE": 503, "CANCELLED": 503, "DEADLINE": 504}
    return ApiError(statuses.get(error["code"], 500), error["text"], error["field"])


def refused(error: RequestError) -> ApiError:
    """An impossible request."""
    return ApiError(400, str(error), error.field)


def from_validation(error: ValidationError) -> ApiError:
    """The first fault of a body, by field."""
    errors = error.errors(include_url=False)
    first = next((problem for problem in errors if problem["type"] == "too_long"), errors[0])
    place = _place(first["loc"])
    kind, value = first["type"], first.get("input")
    if kind == "json_invalid":
        return ApiError(
            400, f"the body is not JSON: {shorten(first['msg'].removeprefix('Invalid JSON: '), 200)}"
        )
    if kind == "missing":
        return ApiError(400, f"{place} is missing", place)
    if kind == "too_long":
        return ApiError(
            400, f"{place} has too many items, expected at most {first['ctx']['max_length']}", place
        )
    if not place:
        return ApiError(400, f"the body is {show(value)}, expected a JSON object")
    text = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{place} is {show(value)}: {shorten(text[0].lower() + text[1:], 300)}", place)


def _place(parts: tuple[int | str, ...]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else shorten(part, 100)
    return path
