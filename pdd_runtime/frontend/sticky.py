"""What a request's variant goes by: the same for all that belong together."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from pdd_runtime.frontend.requests import Body, ChatRequest
from pdd_runtime.pipeline import SessionRequest

BEGINNING = 256
"""Tokens of a plain prompt that say which conversation it is of."""

Headers = Iterable[tuple[bytes, bytes]]


def sticky_key(sticky: Iterable[str], asked: Body, session: SessionRequest, headers: Headers) -> str:
    """By the first of `sticky` that the request has; by its own id where it has none of them. Names of different
    tenants are different."""
    for kind in sticky:
        if (value := _value(kind, asked, session, headers)) is not None:
            return f"{kind}\0{session.tenant}\0{value}"
    return session.id


def _value(kind: str, asked: Body, session: SessionRequest, headers: Headers) -> str | None:
    match kind.split():
        case ["key"]:
            return session.tenant or None
        case ["user"]:
            return asked.user or None
        case ["header", name]:
            wanted = name.lower().encode()
            return next((value.decode("latin-1") for key, value in headers if key == wanted and value), None)
        case _:
            return _beginning(asked, session)


def _beginning(asked: Body, session: SessionRequest) -> str:
    """Of a conversation: every later turn of it has the same."""
    if not isinstance(asked, ChatRequest):
        return xxhash.xxh3_128_hexdigest(repr(session.tokens[:BEGINNING]).encode())
    found = xxhash.xxh3_128()
    for message in asked.messages:
        found.update(f"{message.role}\0{message.content}\0".encode("utf-8", "surrogatepass"))
        if message.role == "user":
            break
    return found.hexdigest()
