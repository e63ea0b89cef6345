"""Reading and checking the body of a request."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from pdd_runtime.frontend.errors import BodyTooLargeError, request_error

MAX_BODY = 32 * 2**20
"""Bytes. A prompt of a million tokens is some 5 MB of text, or 8 MB of token ids in JSON."""

M = TypeVar("M", bound=BaseModel)


async def read(request: Request, model: type[M]) -> M:
    """The body as `model`. Raises `RequestError`; a body over the limit is not read to its end.

    Raises `starlette.requests.ClientDisconnect` where the client leaves while sending it.
    """
    length = request.headers.get("content-length", "0")
    body = bytearray()
    if length.isdecimal() and int(length) > MAX_BODY:
        raise _too_large(int(length))
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise _too_large(len(body))
    try:
        return model.model_validate_json(bytes(body))
    except ValidationError as invalid:
        raise request_error(invalid) from invalid


def _too_large(size: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body has {size} bytes or more; the limit is {MAX_BODY}")
