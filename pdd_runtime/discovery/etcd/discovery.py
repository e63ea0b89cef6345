"""Keeps the members of this process registered in etcd, and what etcd has of all others at hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from pydantic import BaseModel

from pdd_runtime.discovery.etcd.client import Compacted, EtcdClient, EtcdRefused, stubs
from pdd_runtime.discovery.etcd.config import EtcdConfig
from pdd_runtime.discovery.etcd.mirror import Mirror, slot_of
from pdd_runtime.discovery.etcd.registrations import Registrations
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, PddError, PluginError
from pdd_runtime.plugins.discovery import Discovery, GraphMark, Member
from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.waiting import watched

log = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.1, 1.0
"""Seconds between rounds over the servers."""
REGISTER_TIMEOUT = 3.0
"""Seconds that a process waits for etcd before it goes on without."""
UNREGISTER_TIMEOUT = 1.0


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
        self._mine = Registrations(self._mirror, self._graph)
        self._client: EtcdClient | None = None
        """While a server answers, and the mirror follows it."""
        self._lease, self._revision = 0, 0
        self._keeper: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._change = asyncio.Event()
        self._dirty = asyncio.Event()
        self._refused: PddError | None = None
        self._refusals: dict[str, str] = {}
        """Why something of this process cannot be put, as it was told last."""
        self._away = ""
        self._refusal_told = False
        """In this outage."""
        self._closed = False

    @property
    def trouble(self) -> str:
        if self._away:
            return self._away
        fault = self._mirror.foreign_fault()
        return fault.what if fault else ""

    async def register(self, member: Member) -> None:
        """See the contract. Returns when etcd has it; where no server answers, soon, and it is registered as soon as
        one does. Raises `LaunchError` when a newer epoch stands there, `GraphError` where the others have another
        graph, `EtcdRefused` and `PluginError` where the servers or the settings are not as they should be. What is new
        of one that etcd has had is told all the same, as soon as it may be."""
        self._mine.take(member)
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                client = await self._server()
                await self._succeed(client)
                await self._mine.put(client, slot_of(member.key), self._lease)
                # It may have been found out while this waited.
                self._mine.check_place(member.key)
        except (TimeoutError, ConnectionLost, DeadlineExceeded):
            log.warning("%s goes on unregistered: %s", member.key, self._away or "etcd is slow")
        except PddError:
            self._mine.give_up(member.key)
            raise

    async def renew(self, member: Member) -> None:
        """Raises what `register` raises, and `ConnectionLost` or `DeadlineExceeded` where no server answers."""
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                client = await self._server()
                await self._mine.put(client, slot_of(member.key), self._lease)
                await client.keep_alive(self._lease)
        except TimeoutError:
            raise DeadlineExceeded(
                f"etcd did not renew {member.key} in {REGISTER_TIMEOUT:g} s", why=self._away
            ) from None

    async def unregister(self, key: WorkerKey) -> None:
        self._mine.drop(key)
        try:
            async with asyncio.timeout(UNREGISTER_TIMEOUT):
                await self._mine.withdraw(await self._server(), key)
        except (PddError, TimeoutError) as error:
            log.debug("%s is left to expire: %s", key, error)

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """See the contract. Ends when this object is closed. Instead of a first view it may raise as `register`, and
        as soon: who has gone on without etcd waits for it, whatever it says."""
        self._start()
        loop = asyncio.get_running_loop()
        asked = loop.time()
        last: tuple[Member, ...] | None = None
        while not self._closed:
            change = self._change
            asking = last is None and loop.time() < asked + REGISTER_TIMEOUT
            if asking and self._refused is not None:
                raise self._refused
            if self._mirror.listed:
                if asking and not self._mine.stood:
                    self._mirror.check_graph()
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

    def _start(self) -> None:
        if self._keeper is None and not self._closed:
            self._keeper = watched(asyncio.create_task(self._keep(), name="etcd"), "etcd is not followed any more")

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
        refused = isinstance(error, (EtcdRefused, PluginError))
        if refused and not self._mirror.listed:
            self._refused = error
        said = ": ".join(part for part in (error.where, error.what, error.why, error.fix) if part)
        known = "the last known membership stays" if self._mirror.listed else "nobody is found before it answers"
        away = f"etcd is away, {known}: {said}"
        if not self._away or (refused and not self._refusal_told):
            log.warning("%s", away)
            self._refusal_told = refused
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
                        if self._mine.amiss(slots):
                            self._dirty.set()
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
        self._client, self._away, self._refused, self._refusal_told = client, "", None, False
        self._dirty.set()
        self._changed()

    async def _renew(self, client: EtcdClient) -> None:
        while True:
            await asyncio.sleep(self.ttl / 3)
            if not await client.keep_alive(self._lease):
                raise ConnectionLost("the lease has expired", where=client.endpoint, why="this process was held up")
            if self._mine.slots and (self._graph_unsaid or self._succeeds_unsaid or self._mine.amiss(self._mine.slots)):
                self._dirty.set()

    async def _announce(self, client: EtcdClient) -> None:
        """Put what etcd lacks of this process, as often as that is noticed."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._client is not client or not self._mine.slots:
                continue
            await self._try("the graph's past", self._succeed(client))
            for slot in self._mine.slots:
                await self._try(f"{slot[0]}/{slot[1]}", self._mine.put(client, slot, self._lease))
            await self._try("the graph", self._describe(client))

    async def _try(self, what: str, putting: Awaitable[None]) -> None:
        """What is refused keeps nothing else from being put, is told of once, and is tried again with each renewal."""
        try:
            await putting
        except (ConnectionLost, DeadlineExceeded):
            raise
        except PddError as error:
            if self._refusals.get(what) != str(error):
                log.error("cannot register %s: %s", what, error)
            self._refusals[what] = str(error)
        else:
            if self._refusals.pop(what, None):
                log.info("%s is registered again", what)

    async def _describe(self, client: EtcdClient) -> None:
        """Say what the graph's digest stands for."""
        if self._graph_unsaid:
            await client.put(self._mirror.graph_key(), msgspec.json.encode(self._graph.shared), self._lease, 0)

    @property
    def _graph_unsaid(self) -> bool:
        return self._graph.digest not in self._mirror.graphs

    @property
    def _succeeds_unsaid(self) -> bool:
        before, digest = self._graph.succeeds, self._graph.digest
        said = self._mirror.successors.get(digest, ()) if digest in self._mirror.said else ()
        return not set(before).issubset(said)

    async def _succeed(self, client: EtcdClient) -> None:
        """Say what the graph was before, so that the processes of that know those of this."""
        if self._succeeds_unsaid:
            key, value = self._mirror.successor_key(), msgspec.json.encode(self._graph.succeeds)
            entry = await client.get(key)
            await client.put(key, value, self._lease, entry.revision if entry else 0)

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


@hookimpl
def pdd_register_discoveries() -> list[type[Discovery]]:
    return [EtcdDiscovery]
