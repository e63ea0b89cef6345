"""The one answer of a unary call, as the client waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pdd_runtime.errors import PddError, RpcError
from pdd_runtime.rpc.frames import PayloadDecoder


class Reply:
    """Awaited through `future`."""

    def __init__(self, method: str, result: PayloadDecoder) -> None:
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._method, self._decoder = method, result

    def on_result(self, payload: msgspec.Raw) -> None:
        if self.future.done():
            return
        try:
            self.future.set_result(self._decoder.decode(payload, f"the result of {self._method}"))
        except RpcError as error:
            self.future.set_exception(error)

    def on_failure(self, error: PddError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def on_item(self, payload: msgspec.Raw) -> None:
        raise RpcError(f"{self._method} is unary, but the peer sent an item")

    def on_end(self) -> None:
        raise RpcError(f"{self._method} is unary, but the peer ended a stream")
