"""A stream of items from the other side, as the client reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import msgspec

from pdd_runtime.errors import DeadlineExceeded, PddError, RpcError
from pdd_runtime.rpc.frames import WINDOW, Cancel, Credit, PayloadDecoder, cost

if TYPE_CHECKING:
    from pdd_runtime.rpc.connection import RpcConnection

T = TypeVar("T")


class RpcStream(Generic[T]):
    """An async iterator to be closed: `async with connection.stream(…) as items`, or `aclose()`.

    The call begins at `async with` or with the first item asked for. What has arrived is given out before an
    error is raised. Closing it, or cancelling the task that waits for an item, cancels the handler on the
    other side. For one reader at a time.
    """

    def __init__(
        self, connection: RpcConnection, method: str, params: msgspec.Raw, items: PayloadDecoder, timeout: float | None
    ) -> None:
        self._connection, self._method, self._params, self._timeout = connection, method, params, timeout
        self._decoder, self._what = items, f"an item of {method}"
        self._id: int | None = None
        self._items: deque[tuple[T, int]] = deque()
        self._put: Callable[[T], bool] | None = None
        self._owed = 0
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._id is None:
            await self._begin()
        while not self._items:
            if not await self._more():
                raise StopAsyncIteration
        return self._take()

    async def feed(self, put: Callable[[T], bool]) -> bool:
        """Give every item to `put` in the very step in which it arrives: no task wakes up for it. Returns True when
        `put` does, which has enough then, and False when the stream has ended. Raises what `put` raises, too; the
        stream is then stopped on both sides."""
        if self._id is None:
            await self._begin()
        while self._items:
            if put(self._take()):
                return True
        self._put = put
        try:
            while await self._more():
                if self._put is None:
                    return True
            return False
        finally:
            self._put = None

    async def aclose(self) -> None:
        """Stop it on both sides, whatever its state; items not taken are dropped. Idempotent."""
        self._stop()
        self._items.clear()
        self._error = None

    def fail(self, error: PddError) -> None:
        """Stop it on both sides; who reads gets `error` behind what has arrived. Nothing happens where it has ended."""
        if not self._ended:
            self._error = error
            self._stop()

    async def _begin(self) -> None:
        if self._id is not None or self._ended:
            return
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.outbox.room()
            left = None if self._timeout is None else max(0.0, begun_at + self._timeout - loop.time())
            self._id = self._connection.begin(self, self._method, self._params, left, stream=True)
        except TimeoutError:
            self._ended = True
            raise self._too_late() from None
        except BaseException:
            self._ended = True
            raise
        if left is not None:
            self._timer = loop.call_later(left, self._expire)

    async def _more(self) -> bool:
        """Wait until something has come; False: nothing more does."""
        if self._waiter is not None:
            raise RuntimeError(f"two tasks read the stream of {self._method} at once")
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._ended:
            return False
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            self._waiter = None
        return True

    def _take(self) -> T:
        item, credits = self._items.popleft()
        self._consumed(credits)
        return item

    def _consumed(self, credits: int) -> None:
        self._owed += credits
        if self._owed >= WINDOW // 2 and not self._ended and self._id is not None:
            self._connection.send(Credit(self._id, self._owed))
            self._owed = 0

    def _stop(self) -> None:
        """Cancel the other side if it still runs, and wake the reader."""
        if not self._ended and self._id is not None:
            self._connection.send(Cancel(self._id))
        self._end()

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._id is not None:
            self._connection.forget(self._id)
        self._wake()

    def _expire(self) -> None:
        self.fail(self._too_late())

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self._method} did not end in {self._timeout:.3g} s", where=self._connection.where)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the connection tells it.

    def on_item(self, payload: msgspec.Raw) -> None:
        try:
            item: T = self._decoder.decode(payload, self._what)
        except RpcError as error:
            self.fail(error)
            return
        if self._put is None:
            self._items.append((item, cost(payload)))
            self._wake()
            return
        self._consumed(cost(payload))
        try:
            enough = self._put(item)
        except Exception as error:
            self._error = error
            self._stop()
            return
        if enough:
            self._put = None
            self._wake()

    def on_result(self, payload: msgspec.Raw) -> None:
        raise RpcError(f"{self._method} is a stream, but the peer sent one result")

    def on_end(self) -> None:
        self._end()

    def on_failure(self, error: PddError) -> None:
        self._error = error
        self._end()
