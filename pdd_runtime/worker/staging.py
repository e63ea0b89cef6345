"""The memory in which blocks land that are to be converted, bounded for the whole worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdd_runtime.errors import CapacityError


class Staging:
    """Counts the bytes that are taken, and lets others wait: first come, first served."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes. Who asks for more than that in one gets it when nobody else has any."""
        self.limit, self.used = limit, 0
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def take(self, size: int, deadline: float) -> AsyncIterator[None]:
        """Inside, `size` bytes are the caller's. Raises `CapacityError` where they did not come by `deadline`, on the
        loop's clock."""
        try:
            async with asyncio.timeout_at(deadline), self._turn:
                while self.used and self.used + size > self.limit:
                    self._given_back.clear()
                    await self._given_back.wait()
                self.used += size
        except TimeoutError:
            raise CapacityError(
                f"no {size} bytes in which KV of another layout could land came in time",
                why=f"other fetches have {self.used} of {self.limit}",
                fix="send fewer requests at once, or give both pools' engines the same layout",
            ) from None
        try:
            yield
        finally:
            self.used -= size
            self._given_back.set()
