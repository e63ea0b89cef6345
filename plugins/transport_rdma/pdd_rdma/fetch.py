"""One fetch on the receiving side: attempts, until every block has come or is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from pdd_rdma.agent_thread import NixlError
from pdd_rdma.config import RdmaConfig
from pdd_rdma.peers import Lost, Peer, Peers
from pdd_rdma.reader import Landing, Reader
from pdd_rdma.waiting import to_its_end
from pdd_rdma.wire import BLOCKS_LIMIT, FEED, TAKEN, Ask, Offer, Offered, Taken, checksum
from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, PddError, TransferError, leaves
from pdd_runtime.plugins.transport import BlockSink, Subscription, TransferReport

DAMAGES = 8
"""Attempts of one fetch that may end with a damaged block; a host that spoils more is to be repaired, not retried."""
STUCK = 2.0
"""Seconds that a read which nobody wants any more may take to end, before all reads of this worker are ended."""
LATE = 5.0
"""Seconds the sender has, past the deadline, to end a session by itself."""


LOST = (ConnectionLost, DeadlineExceeded)
log = logging.getLogger(__name__)


class Damaged(Lost):
    """A block was not what its checksum says."""


class Fetch:
    """On the loop; `_settle` alone is called from other threads as well."""

    def __init__(
        self,
        endpoint: str,
        subscription: Subscription,
        sink: BlockSink,
        config: RdmaConfig,
        reader: Reader,
        peers: Peers,
        checker: ThreadPoolExecutor,
    ) -> None:
        """`checker` is where blocks are hashed, and the sink is told."""
        self._endpoint, self._subscription, self._sink, self._config = endpoint, subscription, sink, config
        self._reader, self._peers, self._checker = reader, peers, checker
        self._until = now() + subscription.deadline
        self._missing = dict.fromkeys(range(len(subscription.blocks)))
        self._lock = threading.Lock()
        self._blocks = self._gone = self._accepted = 0
        self._window = 2 << min(max(subscription.priority, 0), 3)
        """Pieces at once: reads take turns, so this is the weight."""
        self._trouble = self._why_stopped = ""
        self._task: asyncio.Task[TransferReport] | None = None

    async def run(self, turns: asyncio.Semaphore) -> TransferReport:
        """In a task of its own. Raises what the sender refused with, and `TransferError`. When it has ended, however,
        nothing touches the sink any more."""
        self._task = asyncio.current_task()
        try:
            async with turns:
                return await self._run()
        except asyncio.CancelledError:
            if not self._why_stopped:
                raise
        raise self._failed(self._why_stopped)

    def stop(self, why: str) -> None:
        """Make `run` end soon."""
        self._why_stopped = self._why_stopped or why
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> TransferReport:
        begun = now()
        damages, delay = 0, self._config.retry_delay
        while self._missing:
            if self._why_stopped:
                raise self._failed(self._why_stopped)
            left = len(self._missing)
            try:
                await self._attempt()
            except Lost as lost:
                self._trouble = str(lost)
                damages += isinstance(lost, Damaged)
            if damages > DAMAGES:
                raise self._failed(f"{damages} times a block came damaged")
            if len(self._missing) < left:
                delay = self._config.retry_delay
            elif self._missing:
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._config.retry_delay_max)
        return TransferReport(
            bytes=self._blocks * self._subscription.layout.block_bytes,
            blocks=self._blocks,
            gone=self._gone,
            seconds=now() - begun,
            resumed=max(0, self._accepted - 1),
        )

    def _failed(self, why: str) -> TransferError:
        done, total = self._blocks + self._gone, len(self._subscription.blocks)
        trouble = f"; last trouble: {self._trouble}" if self._trouble else ""
        return TransferError(
            f"{total - done} of {total} blocks did not come from {self._endpoint}",
            where=self._subscription.request_id,
            why=why + trouble,
            fix="see the sender's log; what arrived is kept, and a new fetch asks for the rest",
        )

    async def _attempt(self) -> None:
        """One subscription to what is missing. Raises `Lost` when there is use in another, else `PddError`."""
        numbers = list(self._missing)[:BLOCKS_LIMIT]
        async with self._peers.at(self._endpoint) as peer, self._landing(numbers) as landing:
            try:
                await self._receive(peer, numbers, landing)
            except BaseExceptionGroup as group:
                raise _cause(group) from None
            except LOST as error:
                raise Lost(str(error)) from None

    @asynccontextmanager
    async def _landing(self, numbers: Sequence[int]) -> AsyncIterator[Landing]:
        future = self._reader.land([self._sink.memory(number).cast("B") for number in numbers])
        try:
            landing = await to_its_end(asyncio.wrap_future(future))
        except NixlError as error:
            raise Lost(f"the memory for the blocks cannot be registered: {error}") from None
        except asyncio.CancelledError:
            if future.exception() is None:
                self._reader.lift(future.result())
            raise
        try:
            yield landing
        finally:
            await to_its_end(asyncio.wrap_future(self._reader.lift(landing)))

    async def _receive(self, peer: Peer, numbers: Sequence[int], landing: Landing) -> None:
        left = max(0.001, self._until - now())
        ask = Ask(
            fetch=secrets.token_bytes(16),
            subscription=msgspec.structs.replace(
                self._subscription, blocks=tuple(self._subscription.blocks[number] for number in numbers), deadline=left
            ),
            checksums=self._config.checksums,
        )
        window = asyncio.Semaphore(self._window)
        stream = peer.connection.stream(FEED, ask, Offer, timeout=left + LATE)
        accepted = False
        async with stream, asyncio.TaskGroup() as group:
            async for offer in stream:
                self._accepted += not accepted
                accepted = True
                for index in offer.gone:
                    self._settle(numbers[index], there=False)
                if offer.blocks:
                    await window.acquire()
                    task = group.create_task(self._take(peer, ask.fetch, numbers, landing, offer.blocks))
                    task.add_done_callback(lambda _: window.release())

    async def _take(
        self, peer: Peer, fetch: bytes, numbers: Sequence[int], landing: Landing, blocks: Sequence[Offered]
    ) -> None:
        indices = [block.index for block in blocks]
        read = self._reader.read(
            peer.remote,
            self._subscription.layout.block_bytes,
            np.array([block.number for block in blocks], np.int32),
            landing,
            np.array(indices, np.int32),
        )
        try:
            await self._ended(asyncio.wrap_future(read))
        except NixlError as error:
            # What is known of the peer may not be true any more.
            await peer.connection.close()
            raise Lost(str(error)) from None
        damaged: list[int] = []
        if self._config.checksums:
            damaged = await self._check(numbers, blocks)
        try:
            await peer.connection.call(TAKEN, Taken(fetch, indices), int, timeout=max(0.001, self._until - now()))
        except PddError as error:
            raise Lost(str(error)) from None
        if not self._config.checksums:
            await self._check(numbers, blocks)
        if damaged:
            raise Damaged(f"{len(damaged)} blocks came damaged, the first is {damaged[0]}")

    async def _ended(self, read: asyncio.Future[None]) -> None:
        """Raises `NixlError`. However it ends, the read has."""
        try:
            await asyncio.wait({read})
        except asyncio.CancelledError:
            await to_its_end(asyncio.ensure_future(self._end(read)))
            raise
        read.result()

    async def _end(self, read: asyncio.Future[None]) -> None:
        await asyncio.wait({read}, timeout=STUCK)
        if not read.done():
            log.warning("a read from %s does not end: this worker's reads begin again", self._endpoint)
            await asyncio.wrap_future(self._reader.rebuild())
            await asyncio.wait({read})
        read.exception()  # Asked for: it is no forgotten error.

    async def _check(self, numbers: Sequence[int], blocks: Sequence[Offered]) -> list[int]:
        """Tell the sink what is right; the positions of what is not."""

        def check() -> list[int]:
            damaged = []
            for block in blocks:
                number = numbers[block.index]
                name = self._subscription.blocks[number].name
                memory = self._sink.memory(number)
                if self._config.checksums and checksum(name, memory) != block.checksum:
                    damaged.append(number)
                else:
                    self._sink.done(number)
                    self._settle(number, there=True)
            return damaged

        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._checker, check))

    def _settle(self, number: int, *, there: bool) -> None:
        """A block has come, or will not. Any thread."""
        with self._lock:
            del self._missing[number]
            self._blocks += there
            self._gone += not there


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended an attempt: what there is no use in trying again, else what came first."""
    errors = [*leaves(group)]
    final = (error for error in errors if isinstance(error, PddError) and not isinstance(error, LOST))
    cause = next(final, errors[0])
    return Lost(str(cause)) if isinstance(cause, LOST) else cause
