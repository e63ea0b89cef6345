"""One accepted subscription on the sending side."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

from pdd_rdma.memory import Region
from pdd_rdma.meter import Meter
from pdd_rdma.wire import FIRST_PIECE, PIECE, Ask, Offer, Offered, checksum
from pdd_runtime.errors import PddError, RemoteError, TransferError
from pdd_runtime.plugins.transport import BlockSource, Feed, Gone, Ready
from pdd_runtime.waiting import to_its_end

POLL = 0.1
"""Seconds until a closed session is noticed by the thread that waits for its next block."""


class Session:
    """A thread takes blocks from the feed, hashes them, and hands them over in pieces; the rest is on the loop."""

    def __init__(self, ask: Ask, source: BlockSource, region: Region, meter: Meter, name: str) -> None:
        self._ask, self._source, self._region, self._meter = ask, source, region, meter
        self._subscription, self._block_bytes = ask.subscription, ask.subscription.layout.block_bytes
        self._loop = asyncio.get_running_loop()
        self._offers: asyncio.Queue[Offer | Exception] = asyncio.Queue()
        self._unsettled = len(ask.subscription.blocks)
        self._held: set[int] = set()
        """Indices that are offered and not taken."""
        self._feed: Feed | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def held(self) -> int:
        return len(self._held)

    async def offers(self) -> AsyncIterator[Offer]:
        """Until all is taken or gone. Raises what source and feed raise."""
        self._thread.start()
        while self._unsettled:
            offer = await self._offers.get()
            if isinstance(offer, Exception):
                raise offer
            self._held.update(block.index for block in offer.blocks)
            self._meter.offered(len(offer.blocks) * self._block_bytes)
            self._unsettled -= len(offer.gone)
            yield offer

    def taken(self, indices: Sequence[int]) -> None:
        """Let go of these blocks. Raises `TransferError` for one that is not held."""
        if not self._held.issuperset(indices):
            raise TransferError("blocks were taken that were not offered", where=self._subscription.request_id)
        assert self._feed is not None
        self._held.difference_update(indices)
        for index in indices:
            self._feed.sent(index)
        self._meter.taken(len(indices) * self._block_bytes)
        self._unsettled -= len(indices)
        if not self._unsettled:
            self._offers.put_nowait(Offer())

    async def close(self) -> None:
        """Return when the thread has ended and nothing is held."""
        self._stopped.set()
        try:
            if self._thread.ident is not None:
                await to_its_end(asyncio.ensure_future(asyncio.to_thread(self._thread.join)))
        finally:
            if self._feed is not None:
                self._feed.close()
            self._meter.dropped(len(self._held) * self._block_bytes)
            self._held.clear()

    def _run(self) -> None:
        try:
            self._feed = self._source.open(self._subscription)
            self._hand_over(Offer())
            unsettled, limit = len(self._subscription.blocks), FIRST_PIECE
            while unsettled and not self._stopped.is_set():
                offer = self._next(self._feed, limit)
                limit = min(2 * limit, PIECE)
                if offer.blocks or offer.gone:
                    unsettled -= len(offer.blocks) + len(offer.gone)
                    self._hand_over(offer)
        except PddError as error:
            self._hand_over(error)
        except Exception as error:
            self._hand_over(RemoteError(f"{type(error).__name__}: {error}"))

    def _next(self, feed: Feed, limit: int) -> Offer:
        """What is there, waiting a little for the first of it."""
        there: list[Ready] = []
        gone: list[int] = []
        size, wait = self._block_bytes, POLL
        while (len(there) + 1) * size <= max(limit, size):
            item = feed.next(wait)
            wait = 0.0
            if isinstance(item, Ready):
                there.append(item)
            elif isinstance(item, Gone):
                gone.append(item.index)
            else:
                break
        # One loop that hashes and does nothing else: each block takes out of the cache what the interpreter had there.
        checksums = [self._checksum(ready) for ready in there] if self._ask.checksums else [0] * len(there)
        return Offer([self._offered(*each) for each in zip(there, checksums, strict=True)], gone)

    def _checksum(self, ready: Ready) -> int:
        return checksum(self._subscription.blocks[ready.index].name, ready.memory)

    def _offered(self, ready: Ready, checksum: int) -> Offered:
        block = Region.of(ready.memory)
        number = self._region.block(block)
        if number is None or block.size != self._block_bytes:
            raise TransferError(
                "a block was to be sent that cannot be read",
                where=self._subscription.request_id,
                why=f"it has {block.size} bytes, the receiver expects {self._block_bytes}"
                if block.size != self._block_bytes
                else "it does not lie among the blocks of the worker's memory",
            )
        return Offered(ready.index, number, checksum)

    def _hand_over(self, offer: Offer | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._offers.put_nowait, offer)
            time.sleep(0)  # The loop is to send it now, not when this thread has used up its turn.
        except RuntimeError:
            # The loop is closed, so the worker has ended.
            if not self._loop.is_closed():
                raise
