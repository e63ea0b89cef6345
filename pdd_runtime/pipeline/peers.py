"""The workers that are there: found by discovery, each connected and watched."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence
from functools import partial

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, NoRoute, PddError
from pdd_runtime.kv import seed
from pdd_runtime.kv.names import child
from pdd_runtime.pipeline.deadlines import CONNECT
from pdd_runtime.pipeline.peer import Peer
from pdd_runtime.pipeline.pulse import Pulse
from pdd_runtime.pipeline.sender import Seen
from pdd_runtime.pipeline.times import Times, times_of
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.messages import Empty, WatchEvent
from pdd_runtime.plugins.routing import WorkerKey, WorkerView
from pdd_runtime.rpc import Greeting, RpcConnection, Tls, connect
from pdd_runtime.waiting import watched

__all__ = ["Peer", "Peers", "cached_tokens"]

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.1, 2.0
"""Seconds between attempts to connect to a worker that discovery says is there."""


class Peers:
    """Keeps a connection to every ready worker of the graph. A worker whose connection is lost, or that is silent, is
    out of the view at once, and back when it answers again. One that discovery knows no more stays as long as its
    connection holds: it may be discovery that has lost it."""

    def __init__(self, discovery: Discovery, greeting: Greeting, lines: Lines, tls: Tls | None = None) -> None:
        self.changed = Pulse()
        """Somebody came or went."""
        self.troubles: dict[WorkerKey, str] = {}
        """Why a worker that should be there cannot be reached."""
        self._discovery, self._greeting, self._lines, self._tls = discovery, greeting, lines, tls
        self._members: dict[WorkerKey, Member] = {}
        self._epochs: dict[tuple[str, int], str] = {}
        """By pool and index, as discovery has them."""
        self._peers: dict[WorkerKey, Peer] = {}
        self._times: dict[str, Times] | None = None
        """By pool; None: something has been measured since."""
        self._keepers: dict[WorkerKey, asyncio.Task[None]] = {}
        self._left: set[WorkerKey] = set()
        """Those that drain, and of which nothing more is needed."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look; returns at once."""
        run = asyncio.create_task(self._run(), name="peers")
        self._task = watched(run, "workers that come and go are not seen any more")

    async def close(self) -> None:
        """Drop all connections. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def ready(self) -> list[Peer]:
        """Those that take new sessions."""
        return [peer for peer in self._peers.values() if self._takes_sessions(peer)]

    @property
    def pools(self) -> set[str]:
        """Those of which discovery has a process, be it still starting."""
        return {key.pool for key in self._members}

    def get(self, key: WorkerKey) -> Peer:
        """Raises `NoRoute`: it is not there (any more)."""
        peer = self._peers.get(key)
        if peer is None or peer.connection.closed:
            raise NoRoute(f"worker {key} is not there any more")
        return peer

    def views(self, tokens: Sequence[int], salt: str) -> tuple[WorkerView, ...]:
        """All that take new sessions, each with how much of `tokens` is cached there."""
        ready = self.ready
        cached = cached_tokens(ready, tokens, salt)
        if self._times is None:
            self._times = times_of((peer.key.pool, peer.member.role, peer.load) for peer in self._peers.values())
        times = self._times
        return tuple([peer.view(cached.get(peer.key, 0), times[peer.key.pool]) for peer in ready])

    def telemetry(self) -> list[Seen]:
        """What every worker has seen of the ways from its cluster to others."""
        at = now()
        return [seen for peer in self.ready for seen in peer.sees(at)]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as keepers:
            async for members in self._discovery.watch():
                self._members = {member.key: member for member in members if member.role != "frontend"}
                self._epochs = {(key.pool, key.index): key.epoch for key in self._members}
                for key, member in self._members.items():
                    if member.state == "ready" and key not in self._keepers and key not in self._left:
                        task = keepers.create_task(self._keep(key), name=f"peer {key}")
                        self._keepers[key] = task
                        task.add_done_callback(partial(self._unkept, key))
                self.troubles = {key: why for key, why in self.troubles.items() if key in self._members}
                self._left.intersection_update(self._members)
                self.changed.fire()

    def _takes_sessions(self, peer: Peer) -> bool:
        # A suspected one is not closed, and a closed one is suspected.
        if peer.connection.suspected or peer.draining:
            return False
        member = self._members.get(peer.key)
        if member is None:
            # Or it is being replaced: until its successor is connected, nobody else is there in its place.
            epoch = self._epochs.get((peer.key.pool, peer.key.index))
            return epoch is None or WorkerKey(peer.key.pool, peer.key.index, epoch) not in self._peers
        return member.state == "ready"

    def _unkept(self, key: WorkerKey, _: asyncio.Task[None]) -> None:
        self._keepers.pop(key, None)

    async def _keep(self, key: WorkerKey) -> None:
        """Stay connected as long as discovery knows the worker, or the connection holds."""
        pause = FIRST_RETRY
        while (member := self._members.get(key)) is not None and key not in self._left:
            try:
                connection = await self._meet(member)
            except PddError as error:
                if self.troubles.get(key) != error.what:
                    log.warning("worker %s cannot be reached: %s", key, " ".join(str(error).split()))
                self.troubles[key] = error.what
            else:
                pause = FIRST_RETRY
                await self._follow(Peer(member, connection))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # not all frontends at once
            pause = min(2 * pause, LAST_RETRY)

    async def _meet(self, member: Member) -> RpcConnection:
        connection = await connect(
            member.endpoint, self._greeting, tls=self._tls, line_to=self._lines.to, timeout=CONNECT
        )
        if connection.peer.epoch != member.key.epoch:
            await connection.close()
            raise ConnectionLost(
                "a process of another epoch answers in its place",
                where=member.endpoint,
                why=f"it is {connection.peer.name} of epoch {connection.peer.epoch}, not of {member.key.epoch}",
            )
        return connection

    async def _follow(self, peer: Peer) -> None:
        """Keep the view of one worker right until its connection is lost."""
        leaving: asyncio.Task[None] | None = None
        minding = asyncio.create_task(self._mind(peer), name=f"minding {peer}")
        try:
            async with peer.connection.stream("worker.watch", Empty(), WatchEvent, timeout=None) as events:
                async for event in events:
                    peer.update(event)
                    self._times = None
                    if peer.key not in self._peers:
                        self._peers[peer.key] = peer
                        self.troubles.pop(peer.key, None)
                        self.changed.fire()
                    if peer.draining and leaving is None:
                        self.changed.fire()
                        leaving = asyncio.create_task(self._leave(peer), name=f"leaving {peer}")
        except PddError as error:
            if peer.key not in self._left:
                log.info("worker %s is gone: %s", peer, error.what)
                self.troubles[peer.key] = error.what
        finally:
            tasks = [minding] if leaving is None else [minding, leaving]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._peers.pop(peer.key, None)
            self.changed.fire()
            await peer.connection.close()

    async def _mind(self, peer: Peer) -> None:
        """When it falls silent, and when it is heard again, that is a change."""
        while True:
            await peer.connection.wait_suspected()
            self.changed.fire()
            while peer.connection.suspected:  # noqa: ASYNC110 - it is told only of the one
                await asyncio.sleep(FIRST_RETRY)
            self.changed.fire()

    async def _leave(self, peer: Peer) -> None:
        """It drains, and ends as soon as everybody has left: when no session needs it any more."""
        while peer.needed:
            await peer.less.next()
        log.info("worker %s drains, and no session needs it any more", peer)
        self._left.add(peer.key)
        await peer.connection.close()


def cached_tokens(peers: Iterable[Peer], tokens: Sequence[int], salt: str) -> dict[WorkerKey, int]:
    """How many leading tokens each has cached: whole blocks, and the tail where exactly it is cached, too."""
    families: dict[tuple[bytes, int], list[Peer]] = {}
    for peer in peers:
        if peer.names and peer.member.info is not None:
            layout = peer.member.info.layout
            root = seed(peer.member.info.fingerprint, layout.spec, salt=salt)
            families.setdefault((root, layout.block_size), []).append(peer)
    cached: dict[WorkerKey, int] = {}
    for (name, size), holders in families.items():
        for start in range(0, len(tokens), size):
            name = child(name, tokens[start : start + size])
            still = [peer for peer in holders if name in peer.names]
            if len(still) < len(holders):
                cached.update((peer.key, start) for peer in holders if name not in peer.names)
                holders = still
                if not holders:
                    break
        cached.update((peer.key, len(tokens)) for peer in holders)
    return cached
