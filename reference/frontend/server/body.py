"""From the bytes of a body to a checked request, off the event loop: 8 MiB of JSON take a while."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from reference.frontend.server.errors import APIError, invalid_body

Model = TypeVar("Model", bound=BaseModel)
_MARKS = re.compile(rb'["\[\]{}]|\\.', re.DOTALL)


async def read_body(request: Request, model: type[Model], max_depth: int) -> Model:
    """Read and check a body. Raises APIError: no JSON, nested too deeply, or not what `model` describes."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise APIError(400, "The body must be JSON, sent with Content-Type: application/json.")
    body = await request.body()
    return await asyncio.to_thread(_parse, body, model, max_depth)


def _parse(body: bytes, model: type[Model], max_depth: int) -> Model:
    if exceeds_depth(body, max_depth):
        raise APIError(400, f"The JSON of the body is nested more than {max_depth} levels deep.")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error) from None


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
