"""Something changed: whoever waits for that looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdd_runtime.errors import DeadlineExceeded


class Pulse:
    """Wakes all that wait for a condition, each time something they might look at has changed."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Fired for every token: it costs next to nothing where nobody waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)

    async def next(self) -> None:
        """Return at the next `fire`, however long that takes."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    async def wait(self, timeout: float, what: str) -> None:
        """Return at the next `fire`. Raises `DeadlineExceeded`, which says that `what` was waited for."""
        try:
            async with asyncio.timeout(timeout):
                await self.next()
        except TimeoutError:
            raise DeadlineExceeded(f"nothing happened in {timeout:.3g} s while waiting for {what}") from None

    async def until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Return when `condition` holds. `timeout` is from change to change."""
        while not condition():
            await self.wait(timeout, what)
