"""Keeps the members of this process registered in etcd, and what etcd has of all others at hand."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel

from pdd_runtime.discovery.etcd.client import Compacted, EtcdClient, EtcdRefused, stubs
from pdd_runtime.discovery.etcd.config import EtcdConfig
from pdd_runtime.discovery.etcd.mirror import Mirror, Record, Slot, read, slot_of
from pdd_runtime.discovery.mark import differences
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, GraphError, LaunchError, PddError, PluginError
from pdd_runtime.plugins.discovery import Discovery, GraphMark, Member
from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_runtime.plugins.routing import WorkerKey

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.1, 1.0
"""Seconds between rounds over the servers."""
REGISTER_TIMEOUT = 3.0
"""Seconds that a process waits for etcd before it goes on without."""
UNREGISTER_TIMEOUT = 1.0


@dataclass
class _Own:
    """A member of this process."""

    member: Member
    born: float
    stood: bool = False
    """Whether etcd has ever had it."""

    def record(self, digest: str) -> Record:
        return Record(self.member, self.born, digest)


class EtcdDiscovery(Discovery):
    """All keys of a process hang on one lease. While no server answers, the last known membership stays; members are
    registered again with the first that answers, be it empty."""

    name = "etcd"
    Config = EtcdConfig
    ttl = 10.0

    def __init__(self, config: BaseModel, address: str, secret: str, graph: GraphMark | None = None) -> None:
        """Raises `PluginError` where aetcd is not installed."""
        super().__init__(config, address, secret, graph)
        assert isinstance(config, EtcdConfig)
        stubs()
        self._config, self._graph = config, graph or GraphMark(name="graph")
        self._mirror = Mirror(config.prefix, self._graph)
        self._mine: dict[Slot, _Own] = {}
        self._replaced: set[WorkerKey] = set()
        """Members of this process that a newer epoch has taken the place of."""
        self._putting = asyncio.Lock()
        self._client: EtcdClient | None = None
        """While a server answers, and the mirror follows it."""
        self._lease, self._revision = 0, 0
        self._keeper: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._change = asyncio.Event()
        self._dirty = asyncio.Event()
        self._refused: PddError | None = None
        self._away = ""
        self._closed = False

    @property
    def trouble(self) -> str:
        if self._away:
            return self._away
        foreign = self._mirror.foreign()
        return self._foreign(foreign).what if foreign else ""

    async def register(self, member: Member) -> None:
        """See the contract. Returns when etcd has it; where no server answers, soon, and it is registered as soon as
        one does. Raises `LaunchError` when a newer epoch stands there, `GraphError` where the others have another
        graph, `EtcdRefused` and `PluginError` where the servers or the settings are not as they should be."""
        slot = slot_of(member.key)
        self._check_place(member.key)
        own = self._mine.get(slot)
        if own is not None and own.member.key == member.key:
            own.member = member
        else:
            self._mine[slot] = _Own(member, time.time())
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                await self._put(slot)
                # It may have been found out while this waited.
                self._check_place(member.key)
        except (TimeoutError, ConnectionLost, DeadlineExceeded):
            log.warning("%s goes on unregistered: %s", member.key, self._away or "etcd is slow")
        except PddError:
            self._mine.pop(slot, None)
            raise

    async def renew(self, member: Member) -> None:
        """Raises what `register` raises, and `ConnectionLost` or `DeadlineExceeded` where no server answers."""
        slot = slot_of(member.key)
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                await self._put(slot)
                await (await self._server()).keep_alive(self._lease)
        except TimeoutError:
            raise DeadlineExceeded(
                f"etcd did not renew {member.key} in {REGISTER_TIMEOUT:g} s", why=self._away
            ) from None

    async def unregister(self, key: WorkerKey) -> None:
        slot = slot_of(key)
        own = self._mine.get(slot)
        if own is not None and own.member.key == key:
            del self._mine[slot]
        try:
            async with asyncio.timeout(UNREGISTER_TIMEOUT):
                client = await self._server()
                async with self._putting:
                    entry = await client.get(self._mirror.key(slot))
                    record = read(entry.value, slot) if entry and entry.value else None
                    if entry and record and record.member.key == key:
                        await client.delete(entry.key, entry.revision)
        except (PddError, TimeoutError) as error:
            log.debug("%s is left to expire: %s", key, error)

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """See the contract. Ends when this object is closed. Instead of a first view it may raise as `register`."""
        self._start()
        last: tuple[Member, ...] | None = None
        while not self._closed:
            change = self._change
            if last is None and self._refused is not None:
                raise self._refused
            if self._mirror.listed:
                if last is None and not any(own.stood for own in self._mine.values()):
                    self._check_graph()
                members = self._mirror.members()
                if members is not last and members != last:
                    last = members
                    yield members
                    continue
            await change.wait()

    async def close(self) -> None:
        """Members of this process are unregistered."""
        self._closed = True
        self._mine.clear()
        self._changed()
        if self._client is not None and self._lease:
            with suppress(PddError, TimeoutError):
                async with asyncio.timeout(UNREGISTER_TIMEOUT):
                    await self._client.revoke(self._lease)
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._client = None
        if self._settling is not None:
            self._settling.cancel()

    # What is put.

    async def _put(self, slot: Slot) -> None:
        """Make etcd have the member of this process in `slot`."""
        while True:
            client = await self._server()
            async with self._putting:
                own = self._mine.get(slot)
                if own is None or await self._try_put(client, slot, own):
                    return

    async def _try_put(self, client: EtcdClient, slot: Slot, own: _Own) -> bool:
        """False: somebody else was quicker."""
        if not own.stood:
            self._check_graph()
        entry = await client.get(self._mirror.key(slot))
        there = read(entry.value, slot) if entry and entry.value else None
        if there is not None and there.member.key != own.member.key:
            if not own.stood:
                # Who comes now is the newer one, whatever the clocks of two hosts say.
                own.born = max(own.born, math.nextafter(there.born, math.inf))
            elif there.order > own.record(there.graph).order:
                self._mine.pop(slot, None)
                self._replaced.add(own.member.key)
                self._check_place(own.member.key)
        value = msgspec.json.encode(own.record(self._graph.digest))
        if entry is None or entry.value != value or entry.lease != self._lease:
            revision = entry.revision if entry else 0
            if not await client.put(self._mirror.key(slot), value, self._lease, revision):
                return False
        own.stood = True
        return True

    def _check_place(self, key: WorkerKey) -> None:
        """Raises `LaunchError` where a newer epoch has been seen in its place."""
        if key in self._replaced:
            raise LaunchError(
                f"{key} of epoch {key.epoch} has been replaced",
                where=", ".join(self._config.endpoints),
                why="a newer process registered in its place",
                fix="end this process",
            )

    def _check_graph(self) -> None:
        """Raises `GraphError` where those that are there belong to another graph of this name."""
        foreign = self._mirror.foreign()
        if foreign is not None:
            raise self._foreign(foreign)

    def _foreign(self, foreign: Record) -> GraphError:
        member, theirs = foreign.member, self._mirror.graphs.get(foreign.graph)
        why = "; ".join(differences(self._graph.shared, theirs)) if theirs is not None else ""
        return GraphError(
            f"{member.key} in {member.cluster} belongs to another graph called {self._graph.name}",
            where=", ".join(self._config.endpoints),
            why=why or "what it differs in is not known",
            fix=f"start all clusters with the same file; where that one has just ended, in {self.ttl:g} s it is gone",
        )

    # The keeper.

    def _start(self) -> None:
        if self._keeper is None and not self._closed:
            self._keeper = asyncio.create_task(self._keep(), name="etcd")
            self._keeper.add_done_callback(_say_why)

    async def _server(self) -> EtcdClient:
        """The client, as soon as there is one. Raises what keeps it from ever being there."""
        self._start()
        while self._client is None:
            if self._closed:
                raise ConnectionLost("this discovery is closed")
            if self._refused is not None:
                raise self._refused
            await self._change.wait()
        return self._client

    async def _keep(self) -> None:
        """Hold on to a server, whichever answers, for as long as this object lives."""
        pause, turn = FIRST_RETRY, 0
        while not self._closed:
            endpoint = self._config.endpoints[turn % len(self._config.endpoints)]
            try:
                await self._hold(endpoint)
            except PddError as error:
                if self._client is not None:
                    pause = FIRST_RETRY
                self._lost(error)
            turn += 1
            if turn % len(self._config.endpoints) == 0:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_RETRY)

    def _lost(self, error: PddError) -> None:
        if isinstance(error, (EtcdRefused, PluginError)) and not self._mirror.listed:
            self._refused = error
        why = f": {error.why}" if error.why else ""
        away = f"etcd is away, the last known membership stays: {error.where}: {error.what}{why}"
        if not self._away:
            log.warning("%s", away)
        self._away, self._client = away, None
        self._changed()

    async def _hold(self, endpoint: str) -> None:
        """Serve with one server until it is lost, which is raised."""
        client = EtcdClient(endpoint, self._config)
        try:
            await client.log_in()
            # As long as the lease lives this is the history that we know, and the watch goes on where it was.
            known = bool(self._lease) and await client.keep_alive(self._lease)
            if not known:
                self._lease = await client.grant(self.ttl)
            await _first(self._follow(client, known), self._renew(client), self._announce(client))
        finally:
            await client.close()

    async def _follow(self, client: EtcdClient, known: bool) -> None:
        if not known or not self._mirror.listed:
            await self._list(client, keep=self._mirror.listed)
        while True:
            try:
                async with aclosing(client.watch(self._mirror.root, self._revision + 1)) as batches:
                    async for batch in batches:
                        slots = self._mirror.apply(batch.entries)
                        self._revision = batch.revision or self._revision
                        self._up(client)
                        if slots:
                            self._look_after(slots & self._mine.keys())
                            self._changed()
            except Compacted as error:
                log.info("all members are read again: %s", error.what)
                await self._list(client, keep=False)

    async def _list(self, client: EtcdClient, *, keep: bool) -> None:
        batch = await client.list(self._mirror.root)
        self._mirror.restart(batch.entries, keep=keep)
        self._revision = batch.revision
        if self._settling is not None:
            self._settling.cancel()
        self._settling = asyncio.get_running_loop().call_later(self.ttl, self._settle)
        self._changed()

    def _settle(self) -> None:
        if self._client is None:
            # Nobody can have been heard of meanwhile.
            self._settling = asyncio.get_running_loop().call_later(self.ttl, self._settle)
        elif self._mirror.settle():
            self._changed()

    def _up(self, client: EtcdClient) -> None:
        if self._client is client:
            return
        if self._away:
            log.info("etcd is back: %s", client.endpoint)
        self._client, self._away, self._refused = client, "", None
        self._dirty.set()
        self._changed()

    async def _renew(self, client: EtcdClient) -> None:
        while True:
            await asyncio.sleep(self.ttl / 3)
            if not await client.keep_alive(self._lease):
                raise ConnectionLost("the lease has expired", where=client.endpoint, why="this process was held up")
            if self._mine and self._graph.digest not in self._mirror.graphs:
                self._dirty.set()

    async def _announce(self, client: EtcdClient) -> None:
        """Put what etcd lacks of this process, as often as that is noticed."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._client is not client:
                continue
            for slot in list(self._mine):
                try:
                    await self._put(slot)
                except (ConnectionLost, DeadlineExceeded):
                    raise
                except PddError as error:
                    log.error("cannot register %s/%d: %s", *slot, error)
            if self._mine and self._graph.digest not in self._mirror.graphs:
                await client.put(self._mirror.graph_key(), msgspec.json.encode(self._graph.shared), self._lease, 0)

    def _look_after(self, slots: set[Slot]) -> None:
        """Something happened to a member of this process."""
        for slot in slots:
            own, there = self._mine[slot], self._mirror.get(slot)
            if there is None or (there.member.key != own.member.key and own.stood):
                # Its key is gone, or somebody else has its place: `_put` finds out who is the newer one.
                self._dirty.set()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


async def _first(*parts: Coroutine[Any, Any, None]) -> None:
    """Run them until one fails, which is raised. A task group would do, but on Python 3.11 its owner counts as
    cancelled ever after, and `EtcdClient` goes by that."""
    tasks = [asyncio.create_task(part, name="etcd") for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _say_why(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("etcd is not followed any more", exc_info=error)


@hookimpl
def pdd_register_discoveries() -> list[type[Discovery]]:
    return [EtcdDiscovery]
