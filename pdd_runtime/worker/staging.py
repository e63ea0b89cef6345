"""The memory in which blocks land that are to be converted, bounded for the whole worker."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdd_runtime.errors import CapacityError


class Staging:
    """Gives memory of any size, first come, first served."""

    def __init__(self, limit: int, keep: int = 0) -> None:
        """`limit`: bytes in all. Who asks for more than that in one gets it when nobody else has any. `keep`: how many
        pieces are kept when they come back, the largest: a page's first touch costs more than the copy into it."""
        self.limit, self.used = limit, 0
        self._keep = keep
        self._kept: list[memoryview] = []
        """The smallest first."""
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    @asynccontextmanager
    async def take(self, size: int, deadline: float) -> AsyncIterator[memoryview]:
        """Inside, `size` bytes are the caller's. Raises `CapacityError` where they did not come by `deadline`, on the
        loop's clock, or where the system has none."""
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
            memory = self._memory(size)
            yield memory[:size]
            # Not after an error: what broke off may still be writing.
            self._kept = sorted([*self._kept, memory], key=len)[-self._keep :] if self._keep else []
        finally:
            self.used -= size
            self._given_back.set()

    def _memory(self, size: int) -> memoryview:
        for index, memory in enumerate(self._kept):
            if len(memory) >= size:
                return self._kept.pop(index)
        try:
            return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except OSError as error:
            raise CapacityError(f"no memory for {size} bytes of KV to land in", why=str(error)) from error
