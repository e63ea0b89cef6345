"""The messages by which an application answers its server."""

from __future__ import annotations

from starlette.types import Send

from pdd_runtime.frontend.errors import Answered


def start(status: int, headers: dict[str, str]) -> dict[str, object]:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def end(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, answered: Answered) -> None:
    body = answered.body()
    own = {"content-type": "application/json", "content-length": str(len(body))}
    await send(start(answered.status, own | answered.headers))
    await end(send, body)
