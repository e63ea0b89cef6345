"""Tells an answer that its sessions have made something, at the end of the turn in which they did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Write = Callable[[], None]
"""Writes what has been made for it."""
Straight = Callable[[], Write | None]
"""Makes what an answer has to say; None: it cannot be said without waiting."""


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


class Turn:
    """One turn of the event loop, in which a step's tokens of many answers come. When all are there, each answer makes
    what it has to say, then all of it is written: the same code runs many times in a row, and a client, or a proxy,
    that is woken for one answer finds the others, too."""

    def __init__(self) -> None:
        self._rung: list[Bell] = []

    def add(self, bell: Bell) -> None:
        """Have `bell` answered at the end of this turn."""
        if not self._rung:
            asyncio.get_running_loop().call_soon(self._end)
        self._rung.append(bell)

    def _end(self) -> None:
        rung, self._rung = self._rung, []
        for write in [bell.answered() for bell in rung]:
            if write is not None:
                write()


class Bell:
    """Many ring, one waits, all on the event loop. Rung many times before it is answered, it is answered once: a slow
    reader sends few large pieces."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._rung = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._straight: Straight | None = None

    def ring(self) -> None:
        """Something has been made."""
        if not self._rung:
            self._rung = True
            if self._waiter is not None:
                self._turn.add(self)

    def fail(self, error: Exception) -> None:
        """The request cannot go on. What was made before is still said first; the first failure counts."""
        self._failure = self._failure or error
        self._wake()

    async def wait(self, straight: Straight | None = None) -> None:
        """Return when something has been made that `straight` does not say. Raises what `fail` was given."""
        while not self._rung and self._failure is None:
            self._waiter, self._straight = asyncio.get_running_loop().create_future(), straight
            try:
                await self._waiter
            finally:
                self._waiter = self._straight = None
        if self._failure is not None and (not self._rung or isinstance(self._failure, ClientGone)):
            raise self._failure
        self._rung = False

    def answered(self) -> Write | None:
        """What is to be written at the end of this turn; None: who waits does it."""
        try:
            write = self._straight() if self._straight is not None else None
        except Exception as error:
            self._rung = False
            self.fail(error)
            return None
        if write is None:
            self._wake()
        else:
            self._rung = False
        return write

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
