"""The workers that are there: found by discovery, each connected and watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from pdd_runtime.errors import ConnectionLost, NoRoute, PddError
from pdd_runtime.kv import seed
from pdd_runtime.kv.names import child
from pdd_runtime.pipeline.deadlines import CONNECT
from pdd_runtime.pipeline.pulse import Pulse
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.messages import Empty, WatchEvent
from pdd_runtime.plugins.routing import WorkerKey, WorkerView
from pdd_runtime.plugins.transport import LinkTelemetry
from pdd_runtime.rpc import Greeting, RpcConnection, Tls, connect

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.1, 2.0
"""Seconds between attempts to connect to a worker that discovery says is there."""


class Peer:
    """One connection to one worker, and what the worker last said of itself."""

    def __init__(self, member: Member, connection: RpcConnection) -> None:
        self.member, self.connection = member, connection
        self.key = member.key
        self._capabilities = member.info.capabilities.names if member.info else frozenset()
        self.names: set[bytes] = set()
        """Of the blocks that are cached there."""
        self.load = Load()
        self.links: tuple[LinkTelemetry, ...] = ()
        """What it has seen of the ways to other clusters."""
        self.sessions = 0
        """Sessions of this driver that need it. They count at once; the worker's own load comes a moment later."""
        self.giving = 0
        """Times that it brings KV to another worker, or will have to: it is needed for that beside its sessions."""
        self.less = Pulse()
        """A session needs it no more."""
        self.draining = False
        """It has said that it takes no new sessions."""

    def __str__(self) -> str:
        return str(self.key)

    def update(self, event: WatchEvent) -> None:
        self.names.difference_update(event.removed)
        self.names.update(event.added)
        self.load, self.links = event.load, event.links
        self.draining = self.draining or event.draining

    @property
    def needed(self) -> bool:
        """A session of this driver may still ask something of it."""
        return self.sessions > 0 or self.giving > 0

    @contextmanager
    def gives(self) -> Iterator[None]:
        """It brings KV to another worker."""
        self.giving += 1
        try:
            yield
        finally:
            self.giving -= 1
            self.less.fire()

    @property
    def busy(self) -> float:
        """Requests there over its batch limit."""
        return max(self.load.running + self.load.waiting, self.sessions) / max(1, self.load.batch_limit)

    def tokens_in(self, blocks: int) -> int:
        """How many tokens that many blocks hold, when all are full."""
        return blocks * self.member.info.layout.block_size if self.member.info else 0

    def blocks_in(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.member.info.layout.block_size) if self.member.info else 0

    @property
    def assisted(self) -> bool:
        """It computes no KV of known tokens: each of its decodes needs an offer over all of them."""
        return self.member.info is not None and self.member.info.capabilities.extend == "prefill_assisted"

    @property
    def token_bytes(self) -> int:
        """Of the KV of one token, as it lies there; 0: not known."""
        return self.member.info.layout.token_bytes if self.member.info else 0

    def view(self, cached_tokens: int) -> WorkerView:
        assert self.member.role != "frontend"
        return WorkerView(
            key=self.key,
            role=self.member.role,
            cluster=self.member.cluster,
            cached_tokens=cached_tokens,
            running=self.load.running,
            waiting=max(self.load.waiting, self.sessions - self.load.running),
            batch_limit=max(1, self.load.batch_limit),
            capabilities=self._capabilities,
            token_bytes=self.token_bytes,
        )


class Peers:
    """Keeps a connection to every ready worker of the graph. A worker whose connection is lost is out of the view
    at once, and back when it answers again."""

    def __init__(self, discovery: Discovery, greeting: Greeting, lines: Lines, tls: Tls | None = None) -> None:
        self.changed = Pulse()
        """Somebody came or went."""
        self.troubles: dict[WorkerKey, str] = {}
        """Why a worker that should be there cannot be reached."""
        self._discovery, self._greeting, self._lines, self._tls = discovery, greeting, lines, tls
        self._members: dict[WorkerKey, Member] = {}
        self._peers: dict[WorkerKey, Peer] = {}
        self._keepers: dict[WorkerKey, asyncio.Task[None]] = {}
        self._left: set[WorkerKey] = set()
        """Those that drain, and of which nothing more is needed."""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look; returns at once."""
        self._task = asyncio.create_task(self._run(), name="peers")
        self._task.add_done_callback(_say_why)

    async def close(self) -> None:
        """Drop all connections. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def ready(self) -> list[Peer]:
        """Those that take new sessions."""
        return [
            peer
            for key, peer in self._peers.items()
            if not peer.connection.closed
            and not peer.draining
            and (member := self._members.get(key))
            and member.state == "ready"
        ]

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
        return tuple(peer.view(cached.get(peer.key, 0)) for peer in ready)

    def telemetry(self) -> list[tuple[str, LinkTelemetry]]:
        """What every worker has seen of the ways from its cluster to others."""
        return [(peer.member.cluster, link) for peer in self.ready for link in peer.links]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as keepers:
            async for members in self._discovery.watch():
                self._members = {member.key: member for member in members if member.role != "frontend"}
                for key, member in self._members.items():
                    if member.state == "ready" and key not in self._keepers and key not in self._left:
                        task = keepers.create_task(self._keep(key), name=f"peer {key}")
                        self._keepers[key] = task
                        task.add_done_callback(partial(self._unkept, key))
                self.troubles = {key: why for key, why in self.troubles.items() if key in self._members}
                self._left.intersection_update(self._members)
                self.changed.fire()

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
            await asyncio.sleep(pause)
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
        try:
            async with peer.connection.stream("worker.watch", Empty(), WatchEvent, timeout=None) as events:
                async for event in events:
                    peer.update(event)
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
            if leaving is not None:
                leaving.cancel()
                await asyncio.wait([leaving])
            self._peers.pop(peer.key, None)
            self.changed.fire()
            await peer.connection.close()


    async def _leave(self, peer: Peer) -> None:
        """It drains, and ends as soon as everybody has left: when no session needs it any more."""
        while peer.needed:
            await peer.less.next()
        log.info("worker %s drains, and no session needs it any more", peer)
        self._left.add(peer.key)
        await peer.connection.close()


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("workers that come and go are not seen any more", exc_info=error)


def cached_tokens(peers: Iterable[Peer], tokens: Sequence[int], salt: str) -> dict[WorkerKey, int]:
    """How many leading tokens each has cached: whole blocks, and the tail where exactly it is cached, too."""
    families: dict[tuple[bytes, int], list[Peer]] = {}
    for peer in peers:
        if peer.member.info is not None:
            layout = peer.member.info.layout
            root = seed(peer.member.info.fingerprint, layout.spec, salt=salt)
            families.setdefault((root, layout.block_size), []).append(peer)
    cached: dict[WorkerKey, int] = {}
    for (name, size), holders in families.items():
        for start in range(0, len(tokens), size):
            name = child(name, tokens[start : start + size])
            holders = [peer for peer in holders if name in peer.names]
            if not holders:
                break
            cached.update((peer.key, min(start + size, len(tokens))) for peer in holders)
    return cached
