"""One session on the receiving side: from a subscription to the last block, or to the first trouble."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np

from pdd_rdma.agent_thread import NixlError
from pdd_rdma.peers import Lost, Peer
from pdd_rdma.reader import Landing
from pdd_rdma.readers import Readers
from pdd_rdma.tally import Tally
from pdd_rdma.wire import FEED, TAKEN, Ask, Offer, Offered, Taken, checksum
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, PddError, leaves
from pdd_runtime.plugins.transport import BlockSink, Subscription
from pdd_runtime.waiting import to_its_end

STUCK = 2.0
"""Seconds that a read which nobody wants any more may take to end, before all reads of this worker are ended."""
LATE = 5.0
"""Seconds the sender has, past the deadline, to end a session by itself."""
SLICE = 4 << 20
"""Bytes that are read and hashed at once: little enough for a processor's cache."""
GIVE_BACK = 64 << 20
"""Bytes that the sender holds for us after we have read them, at most, while more is on its way."""

log = logging.getLogger(__name__)


class Damaged(Lost):
    """A block was not what its checksum says."""


class Settle(Protocol):
    def __call__(self, numbers: Sequence[int], *, there: bool) -> None: ...


class Attempt:
    """On the loop. `numbers` are the positions of the subscription's blocks in the fetch, by which the sink knows
    them."""

    def __init__(
        self,
        subscription: Subscription,
        numbers: Sequence[int],
        sink: BlockSink,
        settle: Settle,
        readers: Readers,
        checksums: bool,
    ) -> None:
        self._subscription, self._numbers, self._sink, self._settle = subscription, numbers, sink, settle
        self._readers, self._checksums = readers, checksums
        self._memory = [sink.memory(number) for number in numbers]
        size = subscription.layout.block_bytes
        if any(memory.nbytes != size for memory in self._memory):
            raise ValueError(f"the sink has blocks of other sizes than the {size} bytes of the layout")
        self._fetch = secrets.token_bytes(16)
        self._reading = 0
        """Pieces on their way."""
        self._read: list[Offered] = []
        """Blocks that are to be given back."""
        self.accepted = False

    async def run(self, peer: Peer) -> None:
        """Returns when every block has come or is gone. Raises `Lost` when what is missing may be asked for again, and
        `PddError` when there is no use. However it ends, nothing touches the sink any more."""
        ask = Ask(fetch=self._fetch, subscription=self._subscription, checksums=self._checksums)
        stream = peer.connection.stream(FEED, ask, Offer, timeout=self._subscription.deadline + LATE)
        # Reads take turns, so this is the weight of the fetch among others.
        pieces = asyncio.Semaphore(2 << min(max(self._subscription.priority, 0), 3))
        try:
            async with stream, self._readers.landing(self._memory) as landings, asyncio.TaskGroup() as group:
                async for offer in stream:
                    self.accepted = True
                    self._settle([self._numbers[index] for index in offer.gone], there=False)
                    if offer.blocks:
                        await pieces.acquire()
                        task = group.create_task(self._take(peer, landings, offer.blocks))
                        task.add_done_callback(lambda _: pieces.release())
        except BaseExceptionGroup as errors:
            raise _cause(errors) from None
        except _LOST as error:
            raise Lost(str(error)) from None
        except NixlError as error:
            raise Lost(f"the memory for the blocks cannot be registered: {error}") from None

    async def _take(self, peer: Peer, landings: Sequence[Landing], blocks: Sequence[Offered]) -> None:
        """Read a piece, and give it back: now, or with the next."""
        self._reading += 1
        try:
            damaged = await self._ended(asyncio.wrap_future(self._checked_read(peer, landings, blocks)))
        except NixlError as error:
            # What is known of the peer may not be true any more.
            await peer.connection.close()
            raise Lost(str(error)) from None
        finally:
            self._reading -= 1
        self._read += blocks
        if not self._reading or len(self._read) * self._subscription.layout.block_bytes >= GIVE_BACK:
            await self._give_back(peer)
        if damaged:
            raise Damaged(f"{len(damaged)} blocks came damaged, the first is {damaged[0]}")

    def _checked_read(self, peer: Peer, landings: Sequence[Landing], blocks: Sequence[Offered]) -> Future[list[int]]:
        """Read blocks, slice by slice, and look at each in the thread that read it, while it is in that processor's
        cache; what is damaged."""
        size = self._subscription.layout.block_bytes
        step = max(1, SLICE // size) if self._checksums else len(blocks)
        slices = [blocks[start : start + step] for start in range(0, len(blocks), step)]
        tally = Tally(len(slices))
        for each in slices:
            self._readers.read(
                peer.remote,
                size,
                np.array([block.number for block in each], np.int32),
                landings,
                np.array([block.index for block in each], np.int32),
            ).add_done_callback(tally.counted(partial(self._check, each) if self._checksums else list))
        return tally.done

    async def _ended(self, read: asyncio.Future[list[int]]) -> list[int]:
        """Raises `NixlError`. However it ends, the read has."""
        try:
            await asyncio.wait({read})
        except asyncio.CancelledError:
            await to_its_end(asyncio.ensure_future(self._end(read)))
            raise
        return read.result()

    async def _end(self, read: asyncio.Future[list[int]]) -> None:
        await asyncio.wait({read}, timeout=STUCK)
        if not read.done():
            log.warning("request %s: a read does not end: all begin again", self._subscription.request_id)
            await self._readers.rebuild()
            await asyncio.wait({read})
        read.exception()  # Asked for: it is no forgotten error.

    async def _give_back(self, peer: Peer) -> None:
        """Tell the sender what it need not hold any more. Where blocks have no checksum they are right if it still
        held them."""
        blocks, self._read = self._read, []
        taken = Taken(self._fetch, [block.index for block in blocks])
        try:
            await peer.connection.call(TAKEN, taken, int, timeout=self._subscription.deadline)
        except PddError as error:
            raise Lost(str(error)) from None
        if not self._checksums:
            await to_its_end(asyncio.ensure_future(asyncio.to_thread(self._check, blocks)))

    def _check(self, blocks: Sequence[Offered]) -> list[int]:
        """Tell the sink what is right; the positions of what is not."""
        # One loop that hashes and does nothing else: each block takes out of the cache what the interpreter had there.
        wrong = {block.index for block in blocks if not self._is_right(block)} if self._checksums else set()
        right = [self._numbers[block.index] for block in blocks if block.index not in wrong]
        for number in right:
            self._sink.done(number)
        self._settle(right, there=True)
        return [self._numbers[index] for index in sorted(wrong)]

    def _is_right(self, block: Offered) -> bool:
        return checksum(self._subscription.blocks[block.index].name, self._memory[block.index]) == block.checksum


_LOST = (ConnectionLost, DeadlineExceeded)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended an attempt: what there is no use in trying again, else what came first."""
    errors = [*leaves(group)]
    final = (error for error in errors if isinstance(error, PddError) and not isinstance(error, _LOST))
    cause = next(final, errors[0])
    return Lost(str(cause)) if isinstance(cause, _LOST) else cause
