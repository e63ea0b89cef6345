"""Something changed: whoever waits for that looks again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdd_runtime.errors import DeadlineExceeded


class Pulse:
    """Wakes all that wait for a condition, each time something they might look at has changed."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def fire(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self, timeout: float, what: str) -> None:
        """Return at the next `fire`. Raises `DeadlineExceeded`, which says that `what` was waited for."""
        try:
            async with asyncio.timeout(timeout):
                await self._next.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"nothing happened in {timeout:.3g} s while waiting for {what}") from None

    async def until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Return when `condition` holds. `timeout` is from change to change."""
        while not condition():
            await self.wait(timeout, what)
