"""Every response says which request it answers, and which variant of the graph it had."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdd_runtime.clock import now
from pdd_runtime.ids import new_id

HEADER = "x-pdd-request-id"
VARIANT = "x-pdd-variant"
"""Only where the graph has variants."""
_RAW = HEADER.encode()


class RequestIds:
    """The outermost layer, so that errors have the header, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["pdd_request_id"] = request_id = new_id("req")
        scope["pdd_arrived"] = now()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_RAW, request_id.encode())]
                if (variant := scope.get("pdd_variant")) is not None:
                    message["headers"].append((VARIANT.encode(), variant.encode()))
            await send(message)

        await self._app(scope, receive, send_with_id)
