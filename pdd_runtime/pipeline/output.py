"""What a session has to tell its user, in order, until it has ended."""

from __future__ import annotations

import asyncio
from collections import deque

from pdd_runtime.pipeline.request import Finish
from pdd_runtime.plugins.engine import Token


class Output:
    """A queue from the session to its one reader. Never makes the session wait: max_tokens bounds it."""

    def __init__(self) -> None:
        self._items: deque[Token | Finish] = deque()
        self._more = asyncio.Event()
        self._error: BaseException | None = None
        self.ended = False
        """Nothing more comes: all was said, or the session failed."""

    def put(self, item: Token | Finish) -> None:
        """`Finish` is the last item; what comes later is not for the user any more."""
        if self.ended:
            return
        self._items.append(item)
        self.ended = isinstance(item, Finish)
        self._more.set()

    def fail(self, error: BaseException) -> None:
        """The reader gets `error` behind what is queued. Too late after `Finish`."""
        if not self.ended:
            self._error, self.ended = error, True
            self._more.set()

    async def get(self) -> Token | Finish:
        """The next item. Raises what `fail` was told; not to be called after `Finish`."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._more.clear()
            await self._more.wait()
        return self._items.popleft()
