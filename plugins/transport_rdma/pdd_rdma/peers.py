"""The senders that this worker fetches from: a connection to each, and what it said of its memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdd_rdma.agent_thread import NixlError
from pdd_rdma.memory import MemoryType, Region
from pdd_rdma.reader import Remote
from pdd_rdma.readers import Readers
from pdd_rdma.wire import MEET, Meet, Meeting
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, RpcError, TransferError
from pdd_runtime.plugins.transport import TransportContext
from pdd_runtime.rpc import RpcConnection, connect

MEETING_SECONDS = 5.0
KEPT = 64
"""Peers to which a connection is kept while nothing is fetched."""


class Lost(Exception):
    """What was to be read did not come; it may be asked for again."""


class Peer:
    """What was learnt over one connection holds as long as the connection: whoever restarts is met anew."""

    def __init__(self, connection: RpcConnection, remote: Remote) -> None:
        self.connection, self.remote = connection, remote
        self.users = 0


class Peers:
    def __init__(self, readers: Readers, context: TransportContext) -> None:
        self._readers, self._context = readers, context
        self._peers: dict[str, Peer] = {}
        """By endpoint, the one used last at the end."""
        self._meeting: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def at(self, endpoint: str) -> AsyncIterator[Peer]:
        """The peer that is met there. Raises `Lost`, and `TransferError` where there is no use in coming again."""
        async with self._meeting.setdefault(endpoint, asyncio.Lock()):
            peer = self._peers.pop(endpoint, None)
            if peer is not None and peer.connection.closed:
                self._readers.forget(peer.remote.agent)
                peer = None
            self._peers[endpoint] = peer = peer or await self._meet(endpoint)
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1
            await self._tidy()

    async def close(self) -> None:
        """Leave all; nobody may be reading."""
        for endpoint in tuple(self._peers):
            await self._leave(endpoint)

    async def _meet(self, endpoint: str) -> Peer:
        try:
            connection = await connect(endpoint, self._context.greeting, tls=self._context.tls, timeout=MEETING_SECONDS)
        except (ConnectionLost, DeadlineExceeded) as error:
            raise Lost(error.why or error.what) from None
        except RpcError as error:
            raise TransferError(error.what, where=error.where, why=error.why, fix=error.fix) from error
        try:
            return await self._introduce(connection)
        except BaseException:
            await connection.close()
            raise

    async def _introduce(self, connection: RpcConnection) -> Peer:
        try:
            meeting = await connection.call(MEET, Meet(), Meeting, timeout=MEETING_SECONDS)
        except (ConnectionLost, DeadlineExceeded) as error:
            raise Lost(error.why or error.what) from None
        try:
            await self._readers.meet(meeting.agent, meeting.metadata)
        except NixlError as error:
            raise Lost(f"NIXL cannot reach {connection.where}: {error}") from None
        region, kind = Region(meeting.address, meeting.size), MemoryType(meeting.kind, meeting.device)
        return Peer(connection, Remote(meeting.agent, region, kind))

    async def _tidy(self) -> None:
        """Leave those that are lost, and of the others those that were not used for longest."""
        idle = [
            endpoint
            for endpoint, peer in self._peers.items()
            if not peer.users and not self._meeting[endpoint].locked()
        ]
        surplus = len(idle) - KEPT
        for rank, endpoint in enumerate(idle):
            if rank < surplus or self._peers[endpoint].connection.closed:
                await self._leave(endpoint)

    async def _leave(self, endpoint: str) -> None:
        del self._meeting[endpoint]
        peer = self._peers.pop(endpoint)
        self._readers.forget(peer.remote.agent)
        await peer.connection.close()
