"""One fetch on the receiving side: attempts, until every block has come or is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import msgspec

from pdd_rdma.attempt import Attempt, Damaged
from pdd_rdma.config import RdmaConfig
from pdd_rdma.peers import Lost, Peers
from pdd_rdma.readers import Readers
from pdd_rdma.wire import BLOCKS_LIMIT
from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import BlockSink, Subscription, TransferReport, incomplete

DAMAGES = 8
"""Attempts of one fetch that may end with a damaged block; a host that spoils more is to be repaired, not retried."""


class Fetch:
    """On the loop; `_settle` alone is called from other threads as well."""

    def __init__(
        self,
        endpoint: str,
        subscription: Subscription,
        sink: BlockSink,
        config: RdmaConfig,
        readers: Readers,
        peers: Peers,
    ) -> None:
        self._endpoint, self._subscription, self._sink, self._config = endpoint, subscription, sink, config
        self._readers, self._peers = readers, peers
        self._until = now() + subscription.deadline
        self._missing = dict.fromkeys(range(len(subscription.blocks)))
        self._lock = threading.Lock()
        self._blocks = self._gone = self._accepted = 0
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
        return incomplete(self._subscription, self._endpoint, self._blocks + self._gone, why, self._trouble)

    async def _attempt(self) -> None:
        """One subscription to what is missing. Raises `Lost` when there is use in another, else `PddError`."""
        numbers = list(self._missing)[:BLOCKS_LIMIT]
        subscription = msgspec.structs.replace(
            self._subscription,
            blocks=tuple(self._subscription.blocks[number] for number in numbers),
            deadline=max(0.001, self._until - now()),
        )
        checksums = self._config.hashes(self._endpoint)
        attempt = Attempt(subscription, numbers, self._sink, self._settle, self._readers, checksums)
        async with self._peers.at(self._endpoint) as peer:
            try:
                await attempt.run(peer)
            finally:
                self._accepted += attempt.accepted

    def _settle(self, numbers: Sequence[int], *, there: bool) -> None:
        """These blocks have come, or will not. Any thread."""
        with self._lock:
            for number in numbers:
                del self._missing[number]
            self._blocks += there * len(numbers)
            self._gone += (not there) * len(numbers)
