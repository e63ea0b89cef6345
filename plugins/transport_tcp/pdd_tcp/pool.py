"""The senders to which connections are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import TransportContext
from pdd_tcp.config import TcpConfig
from pdd_tcp.incoming import Incoming
from pdd_tcp.peer import Peer

Key = tuple[str, str, str]
"""Endpoint, the sender's epoch, and the receiver's cluster."""


class Pool:
    """At most `config.peers` senders, each with at most `config.streams` connections. On the event loop."""

    def __init__(self, config: TcpConfig, context: TransportContext) -> None:
        self._config, self._context = config, context
        self._peers: dict[Key, Peer] = {}
        """The one used last stands last."""
        self._ending: list[Peer] = []
        self._room = asyncio.Event()
        """Set when one may have become idle."""
        self._count = 0

    @asynccontextmanager
    async def run(self, fetch: Incoming) -> AsyncIterator[None]:
        """Run a fetch. At the end it is over, and nothing touches its memory any more. Raises `TransferError` for an
        endpoint that is none, and what ends the fetch while no sender can be let go for it."""
        host, _, port = fetch.endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise TransferError(f"{fetch.endpoint!r} is no endpoint", fix="give it as host:port")
        address = (host.removeprefix("[").removesuffix("]"), int(port))
        peer = await self._add(fetch, address)
        try:
            yield
        finally:
            fetch.stop("the fetch was cancelled")
            peer.drop(fetch)
            self._room.set()

    async def close(self) -> None:
        """All fetches are over. Return when every thread has ended."""
        peers = [*self._peers.values(), *self._ending]
        self._peers.clear()
        self._room.set()
        await asyncio.to_thread(_close, peers)

    async def _add(self, fetch: Incoming, address: tuple[str, int]) -> Peer:
        while True:
            if fetch.over:
                fetch.result()
            self._room.clear()
            peer = self._find((fetch.endpoint, fetch.subscription.epoch, fetch.subscription.cluster), address)
            if peer is not None and peer.add(fetch):
                return peer
            if peer is None:
                fetch.trouble = f"all of the {self._config.peers} senders to which connections are kept are in use"
                try:
                    async with asyncio.timeout(fetch.until - now()):
                        await self._room.wait()
                except TimeoutError:
                    fetch.stop(fetch.late)

    def _find(self, key: Key, address: tuple[str, int]) -> Peer | None:
        """The peer of that key; None where there is no room for one more."""
        self._ending = [peer for peer in self._ending if peer.alive]
        for each in [each for each, peer in self._peers.items() if peer.closed]:
            self._ending.append(self._peers.pop(each))
        peer = self._peers.pop(key, None)
        if peer is None:
            for other, stale in self._peers.items():
                if other[0] == key[0] and other[1] != key[1]:
                    stale.retire()
            if len(self._peers) >= self._config.peers:
                idle = next((each for each, peer in self._peers.items() if peer.idle), None)
                if idle is None:
                    return None
                self._peers[idle].retire()
                self._ending.append(self._peers.pop(idle))
            self._count += 1
            peer = Peer(address, key[2], self._context, self._config, f"pdd-tcp-peer-{self._count}")
        self._peers[key] = peer
        return peer


def _close(peers: Iterable[Peer]) -> None:
    for peer in peers:
        peer.close()
