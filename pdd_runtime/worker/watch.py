"""What a watcher of a worker is told: names of blocks, load and links, coalesced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from pdd_runtime.kv import BlockStore, CachedNames
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.messages import WatchEvent
from pdd_runtime.plugins.transport import LinkTelemetry
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.farewell import Farewell

PERIOD = 0.02
"""Seconds between two events, at least."""
LOAD_PERIOD = 0.25
"""Seconds after which the load is looked at even where no block and no request has changed."""
NAMES = 65536
"""In one event at most: 1 MiB of them."""


class StoreWatch:
    """Collects the changes of one watcher. Not more than one per block, however slowly it reads."""

    def __init__(
        self,
        store: BlockStore | CachedNames,
        activity: Activity,
        load: Callable[[], Awaitable[Load]],
        links: Callable[[], tuple[LinkTelemetry, ...]],
        farewell: Farewell,
    ) -> None:
        self._store, self._activity, self._load, self._links = store, activity, load, links
        self._farewell = farewell
        self._changes: dict[bytes, bool] = {}
        self._changed = asyncio.Event()

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        """All names first, then what changes."""
        stops = (
            self._store.watch(self._on_block),
            self._activity.watch(lambda _: self._changed.set()),
            self._farewell.watch(self._changed.set),
        )
        try:
            self._changes = dict.fromkeys(self._store.names(), True)
            last: tuple[Load, tuple[LinkTelemetry, ...], bool] | None = None
            while True:
                state = await self._load(), self._links(), self._farewell.said
                added, removed = self._take()
                if added or removed or state != last:
                    last = state
                    yield WatchEvent(added=added, removed=removed, load=state[0], links=state[1], draining=state[2])
                if not self._changes:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LOAD_PERIOD):
                            await self._changed.wait()
                await asyncio.sleep(PERIOD)
                self._changed.clear()
        finally:
            for stop in stops:
                stop()

    def _on_block(self, name: bytes, added: bool) -> None:
        # What the watcher has not been told of yet and is undone needs no telling.
        if self._changes.get(name) is (not added):
            del self._changes[name]
        else:
            self._changes[name] = added
        self._changed.set()

    def _take(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        taken = list(self._changes.items())[:NAMES]
        for name, _ in taken:
            del self._changes[name]
        return tuple(name for name, here in taken if here), tuple(name for name, here in taken if not here)
