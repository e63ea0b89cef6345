"""Errors as OpenAI clients read them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import http
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdd_runtime.errors import (
    Cancelled,
    CapacityError,
    ConnectionLost,
    DeadlineExceeded,
    NoRoute,
    Overloaded,
    PddError,
    RequestError,
    TransferError,
    WorkerLost,
)

RETRY_AFTER = 1
"""Seconds a client is told to wait where trying again may help: dead peers are replaced in that order of time."""


class UnknownModelError(RequestError):
    """The graph serves no model of this name."""

    code = "model_not_found"


class ContextTooLongError(RequestError):
    """Prompt and answer together do not fit the model's context."""

    code = "context_length_exceeded"


class BodyTooLargeError(RequestError):
    """The request's body is over the limit."""

    code = "body_too_large"


class NotFoundError(RequestError):
    """No such thing here."""

    code = "not_found"


class InvalidKeyError(RequestError):
    """No API key was sent, or one that is not known."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The API key is for other things."""

    code = "forbidden"


class RateLimitError(Overloaded):
    """The API key asks for more than it may."""

    code = "rate_limit_exceeded"


class EndedByOperatorError(Cancelled):
    """Somebody who may has cancelled the request."""

    code = "cancelled_by_operator"


class Answered(NamedTuple):
    """An error, ready to be sent."""

    status: int
    error: dict[str, str | None]
    headers: dict[str, str]

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.error})


# The first class that fits decides; narrower ones stand before wider ones.
_STATUS: Sequence[tuple[type[PddError], int]] = (
    (UnknownModelError, 404),
    (NotFoundError, 404),
    (InvalidKeyError, 401),
    (ForbiddenError, 403),
    (BodyTooLargeError, 413),
    (RequestError, 400),
    (NoRoute, 503),
    # As gRPC's CANCELLED becomes HTTP: https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto.
    # Clients try a 5xx again by themselves.
    (EndedByOperatorError, 499),
    (Cancelled, 503),
    (CapacityError, 429),
    (Overloaded, 429),
    (DeadlineExceeded, 504),
    (WorkerLost, 502),
    (ConnectionLost, 502),
    (TransferError, 502),
)


def answer_for(error: BaseException) -> Answered:
    """What a client is told about `error`, whatever it is."""
    if not isinstance(error, PddError):
        # Its text may hold anything, so it goes to the log and not to the user.
        return _answered(500, "the server failed on this request; its log says why", None, "internal_error")
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    param = error.where or None if isinstance(error, RequestError) else None
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after), 1))
    if isinstance(error, InvalidKeyError):
        headers["WWW-Authenticate"] = "Bearer"
    return _answered(status, sentence(error), param, error.code, headers)


def answer_for_status(status: int, headers: Mapping[str, str] | None = None) -> Answered:
    """For what the HTTP layer itself refuses: unknown paths and methods."""
    phrase = http.HTTPStatus(status).phrase.lower()
    return _answered(status, f"{phrase}; GET /docs lists the endpoints", None, phrase.replace(" ", "_"), headers)


def sentence(error: PddError) -> str:
    """The error on one line: what, why, fix. A wrong field is named in `param` and in the sentence."""
    parts = [f"{error.where}: {error.what}" if error.where else error.what]
    parts += [f"why: {error.why}"] if error.why else []
    parts += [f"fix: {error.fix}"] if error.fix else []
    return "; ".join(parts)


def request_error(invalid: ValidationError) -> RequestError:
    """The first fault of a body that does not fit its model, by field; the others are counted."""
    first, *others = invalid.errors(include_url=False, include_context=False)
    where = ".".join(str(part) for part in first["loc"])
    what = _message(first)
    if others:
        what += f" (and {len(others)} more wrong field{'s' if len(others) > 1 else ''})"
    return RequestError(what, where=where)


def _message(detail: ErrorDetails) -> str:
    if detail["type"] == "json_invalid":
        return f"the body is no valid JSON: {detail['msg'].removeprefix('Invalid JSON: ')}"
    if not detail["loc"]:
        return "the body must be a JSON object"
    if detail["type"] == "missing":
        return "this field is required"
    if detail["type"] == "value_error":  # ours, and it says enough of the value
        return detail["msg"].removeprefix("Value error, ")
    message = detail["msg"].partition(" after validation")[0]
    shown = repr(detail["input"])
    return f"{message[0].lower()}{message[1:]}, not {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _answered(
    status: int, message: str, param: str | None, code: str, headers: Mapping[str, str] | None = None
) -> Answered:
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    if status == 429:
        kind = "rate_limit_error"
    extra = dict(headers or {})
    if status in (429, 503):
        extra.setdefault("Retry-After", str(RETRY_AFTER))
    return Answered(status, {"message": message, "type": kind, "param": param, "code": code}, extra)
