"""The block store of a worker, in which one can wait for room."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import BlockStore, KvLayout


class WorkerStore(BlockStore):
    """A `BlockStore` whose releases wake those who wait for blocks: first come, first served."""

    def __init__(self, layout: KvLayout, blocks: int, *, shared: bool = False) -> None:
        super().__init__(layout, blocks, shared=shared)
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self._serving: asyncio.Handle | None = None

    async def room(self, n: int) -> list[int]:
        """As `allocate`, but waits until so many can be had. Raises `CapacityError` where they never can."""
        if n > self.blocks:
            raise CapacityError(
                f"no room for {n} blocks of KV",
                why=f"the worker has {self.blocks} in all",
                fix="shorten the request, or give the pool more blocks",
            )
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[list[int]] = loop.create_future()
        self._waiting.append((n, mine))
        self._serve()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.release(mine.result())
            # A smaller request behind this one may fit.
            self._serve_soon()
            raise

    def release(self, blocks: Iterable[int]) -> None:
        super().release(blocks)
        self._serve_soon()

    def _serve_soon(self) -> None:
        # Not at once: a release is part of some larger step that is not to be entered in its middle.
        if self._waiting and self._serving is None:
            self._serving = asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serving = None
        while self._waiting:
            n, waiter = self._waiting[0]
            if not waiter.done():
                try:
                    waiter.set_result(self.allocate(n))
                except CapacityError:
                    return
            self._waiting.popleft()
