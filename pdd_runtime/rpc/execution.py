"""The execution of one call in the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, DeadlineExceeded, PddError, RemoteError
from pdd_runtime.hiding import hidden
from pdd_runtime.rpc.channel import Channel
from pdd_runtime.rpc.context import RpcContext
from pdd_runtime.rpc.frames import WINDOW, Call, End, Failure, Item, PayloadDecoder, Result, cost, pack
from pdd_runtime.rpc.greeting import Greeting

log = logging.getLogger(__name__)

ERROR_TEXT_LIMIT = 16 * 2**10
"""Characters of each field of an error that crosses the wire."""


@dataclass(frozen=True, slots=True)
class UnaryMethod:
    """One request, one answer."""

    params: PayloadDecoder
    handler: Callable[[Any, RpcContext], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class StreamMethod:
    """One request, a stream of items."""

    params: PayloadDecoder
    handler: Callable[[Any, RpcContext], AsyncGenerator[object, None]]


Method = UnaryMethod | StreamMethod


class Execution:
    """Runs the handler and sends what it gives, within deadline and credit. Cancel its task to stop it."""

    def __init__(
        self, call: Call, method: Method, params: Any, channel: Channel, peer: Greeting, hide: Sequence[str] = ()
    ) -> None:
        self.id = call.id
        self.cancelled = False
        """By the client, who wants no answer any more."""
        self._call, self._method, self._params, self._channel = call, method, params, channel
        self._hide = hide
        deadline = None if call.timeout is None else now() + call.timeout
        self._context = RpcContext(peer, deadline)
        self._credit = WINDOW
        self._more_credit = asyncio.Event()

    def add_credit(self, amount: int) -> None:
        self._credit += amount
        self._more_credit.set()

    async def run(self) -> None:
        """Ends the call with exactly one last frame, unless the client cancelled it. Raises only CancelledError."""
        timeout = asyncio.timeout(self._context.remaining)
        try:
            async with timeout:
                if isinstance(self._method, UnaryMethod):
                    result = pack(await self._method.handler(self._params, self._context))
                    await self._channel.outbox.room()
                    self._channel.send(Result(self.id, result))
                else:
                    await self._stream(self._method)
        except asyncio.CancelledError:
            if not self.cancelled:
                self._fail(Cancelled("the server cancelled the call", where=self._call.method))
            raise
        except PddError as error:
            self._fail(error)
        except Exception as error:
            if timeout.expired():
                self._fail(DeadlineExceeded(f"{self._call.method} did not end in {self._call.timeout:.3g} s"))
            else:
                log.exception("%s, called by %s, crashed", self._call.method, self._context.peer.name)
                self._fail(RemoteError(f"{type(error).__name__}: {error}", where=self._call.method))

    async def _stream(self, method: StreamMethod) -> None:
        outbox = self._channel.outbox
        async with aclosing(method.handler(self._params, self._context)) as items:
            async for item in items:
                payload = pack(item)
                while self._credit <= 0:
                    self._more_credit.clear()
                    await self._more_credit.wait()
                if outbox.full:
                    await outbox.room()
                outbox.send(Item(self.id, payload))
                self._credit -= cost(payload)
        outbox.send(End(self.id))

    def _fail(self, error: PddError) -> None:
        self._channel.send(Failure(self.id, to_wire(error, self._hide)))


def to_wire(error: PddError, hide: Sequence[str]) -> dict[str, str]:
    """The error as it is told to a client: no longer than it may be, and without what is to be hidden."""
    return {field: hidden(text, hide)[:ERROR_TEXT_LIMIT] for field, text in error.to_wire().items()}
