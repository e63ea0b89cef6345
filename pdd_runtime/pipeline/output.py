"""What a session has to tell its user, in order, until it has ended."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdd_runtime.pipeline.request import Finish
from pdd_runtime.plugins.engine import Token


class Output:
    """A queue from the session to its one reader. Never makes the session wait: max_tokens bounds it."""

    def __init__(self) -> None:
        self._items: deque[Token | Finish] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._deliver: Callable[[Token | Finish], None] | None = None
        self._error: BaseException | None = None
        self.ended = False
        """Nothing more comes: all was said, or the session failed."""

    def put(self, item: Token | Finish) -> None:
        """`Finish` is the last item; what comes later is not for the user any more."""
        if self.ended:
            return
        self.ended = isinstance(item, Finish)
        if self._deliver is None:
            self._items.append(item)
            self._wake()
            return
        self._deliver(item)
        if self.ended:
            self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets `error` behind what is queued. Too late after `Finish`."""
        if not self.ended:
            self._error, self.ended = error, True
            self._wake()

    async def get(self) -> Token | Finish:
        """The next item. Raises what `fail` was told; not to be called after `Finish`."""
        while not self._items:
            await self._more()
        return self._items.popleft()

    async def deliver(self, put: Callable[[Token | Finish], None]) -> None:
        """Give every item to `put`, in the very step in which the session makes it: no task has to wake up for it.
        Returns after `Finish`. Raises what `fail` was told."""
        while self._items:
            put(self._items.popleft())
        self._deliver = put
        while not self.ended or self._error is not None:
            await self._more()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
