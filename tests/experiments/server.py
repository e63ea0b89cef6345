"""A server that answers as a test tells it to, down to the bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answer = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]
"""Gets the request's body as well."""
TIMELINE = {"kv": [], "events": [], "finish_reason": "length", "error": None}
SSE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\nx-pdd-request-id: req-1\r\n\r\n"
)


def whole(body: object, status: str = "200 OK") -> bytes:
    data = json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


def event(*tokens: int, text: str = "x") -> bytes:
    return f"data: {json.dumps({'choices': [{'text': text, 'token_ids': list(tokens)}]})}\n\n".encode()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b"0\r\n\r\n")
    await writer.drain()


@asynccontextmanager
async def server(answer: Answer, timelines: list[object] | None = None) -> AsyncIterator[str]:
    """Answers /v1/completions as told, and other paths as a frontend does."""
    left = list([TIMELINE] if timelines is None else timelines)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST /v1/completions"):
                    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                    await answer(writer, await reader.readexactly(length))
                elif head.startswith(b"GET /v1/models"):
                    writer.write(whole({"data": [{"id": "toy"}]}))
                else:
                    writer.write(whole(left.pop(0) if len(left) > 1 else left[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
