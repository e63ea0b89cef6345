"""A server on a port of this host, of whatever routes a test gives it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from tests.waiting import PATIENCE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Yields its address. A handler is cancelled when its client goes."""
    runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=PATIENCE)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def send_events(request: web.Request, *events: str) -> web.StreamResponse:
    """A stream of these, each written by itself."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\n\n".encode())
    return response
