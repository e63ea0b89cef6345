"""Where the sessions of one request put what they make, until it is sent."""

from __future__ import annotations

import asyncio

from pdd_runtime.pipeline import Finish
from pdd_runtime.plugins.engine import Token

Item = tuple[int, Token | Finish]
"""The number of a session, and what it made."""


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


class Inbox:
    """One reader, many writers, all on the event loop.

    It has no bound of its own: a session makes at most `max_tokens` items, and a slow reader must not hold up
    a decode batch. Everything that came since the last `take` is taken at once, so a slow reader sends few
    large pieces.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, number: int, made: Token | Finish) -> None:
        self._items.append((number, made))
        self._wake()

    def fail(self, error: Exception) -> None:
        """The request cannot go on. What was made before is still taken first; the first failure counts."""
        self._failure = self._failure or error
        self._wake()

    async def take(self) -> list[Item]:
        """Wait until there is something, and take all of it. Raises what `fail` was given."""
        while not isinstance(self._failure, ClientGone) and not self._items:
            if self._failure is not None:
                raise self._failure
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if isinstance(self._failure, ClientGone):
            raise self._failure
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
