"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

MAX_MESSAGE = 1000  # characters; the whole body stays far below 4 KiB

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
}


class APIError(Exception):
    """An answer that is an error.

    Args:
        status: of the HTTP response.
        message: one clear sentence. Never a part of the request's body but a number or a field's name.
        param: the field that is to blame.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers

    def content(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}..."
        kind = _TYPES.get(self.status, "internal_server_error")
        # Half of a surrogate pair can stand in JSON but not in UTF-8.
        message = message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.status}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content(), self.status, headers=dict(self.headers or {}))


def bad_request(error: ValueError, fields: Iterable[str]) -> APIError:
    """A refusal of the engine's front end; its sentence names the parameter, which is looked for among `fields`."""
    sentence = str(error)
    words = re.findall(r"\w+", sentence)
    known = set(fields)
    return APIError(400, sentence, next((word for word in words if word in known), None))


def invalid_body(error: ValidationError) -> APIError:
    """The first thing that is wrong with a body. Only names and types: what the client sent is not repeated."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    # Every member of a union that was tried has its own error. The deepest says most: that member fitted best.
    first = max((e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    place = [part for part in first["loc"] if isinstance(part, str)]
    param = place[0] if place else None
    if first["type"] == "extra_forbidden":
        # The name is the client's own text, and may be of any length.
        return APIError(
            400,
            f"The field {'.'.join(map(str, first['loc']))[:100]!r} is not supported.",
            param and param[:100],
        )
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        named = re.match(r"'(\w+)'", message)
        return APIError(400, message, param or (named and named[1]))
    if first["type"] == "json_invalid":
        return APIError(400, "The body is no valid JSON.")
    return APIError(400, f"{param}: {message}." if param else f"{message}.", param)
