"""From the bytes of a body to a checked request, off the event loop: 8 MiB of JSON take a while."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from reference.frontend.server.args import Limits
from reference.frontend.server.errors import APIError, invalid_body

Model = TypeVar("Model", bound=BaseModel)
_BACKSLASH = ord("\\")
_MARKS = re.compile(rb'["\[\]{}]|\\.', re.DOTALL)


async def read_body(request: Request, model: type[Model], limits: Limits) -> Model:
    """Read and check a body. Raises APIError: no JSON, beyond a limit, or not what `model` describes."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(400, "The body must be JSON, sent with Content-Type: application/json.")
    body = await request.body()
    return await asyncio.to_thread(_parse, body, model, limits)


def _parse(body: bytes, model: type[Model], limits: Limits) -> Model:
    max_depth, max_values = limits.max_json_depth, limits.max_json_values
    if exceeds_values(body, max_values):
        raise APIError(400, f"The JSON of the body has more than {max_values} values; send several requests.")
    if exceeds_depth(body, max_depth):
        raise APIError(400, f"The JSON of the body is nested more than {max_depth} levels deep.")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


def exceeds_values(body: bytes, max_values: int) -> bool:
    """Whether there are more commas than that outside of strings; linear in time, and other threads get their turn.

    The parser gives nobody a turn, and text without many values is read in no time: so values are what is limited.
    """
    if body.count(b",") < max_values:
        return False
    count, position = 0, 0
    while position < len(body):
        quote = body.find(b'"', position)
        end = len(body) if quote < 0 else quote
        count += body.count(b",", position, end)
        if count >= max_values:
            return True
        position = _end_of_string(body, end + 1)
    return False


def _end_of_string(body: bytes, start: int) -> int:
    """The position behind the quote that ends the string whose first character is at `start`."""
    while True:
        quote = body.find(b'"', start)
        if quote < 0:
            return len(body)
        before = quote
        while before > start and body[before - 1] == _BACKSLASH:
            before -= 1
        start = quote + 1
        if (quote - before) % 2 == 0:
            return start


def exceeds_depth(body: bytes, max_depth: int) -> bool:
    """Whether brackets outside of strings are nested deeper than that; linear in time, whatever the bytes are."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False
    depth, in_string = 0, False
    for match in _MARKS.finditer(body):
        mark = match[0]
        if mark == b'"':
            in_string = not in_string
        elif not in_string and mark in b"[{":
            depth += 1
            if depth > max_depth:
                return True
        elif not in_string and mark in b"]}":
            depth -= 1
    return False
