"""The `local` discovery: the processes of one host find each other through their launcher."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import suppress

from pydantic import BaseModel

from pdd_runtime.clock import now
from pdd_runtime.discovery.registry import TTL, Departure, Receipt, Registration, View, Watch
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, LaunchError, PddError
from pdd_runtime.plugins.discovery import Discovery, GraphMark, Member
from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcConnection, connect
from pdd_runtime.waiting import watched

log = logging.getLogger(__name__)

RETRY = 0.2
"""Seconds between attempts to reach a registry that is away."""
REGISTER_TIMEOUT = 10.0
UNREGISTER_TIMEOUT = 1.0


class LocalConfig(BaseModel, extra="forbid", frozen=True):
    """Nothing to configure."""


class LocalDiscovery(Discovery):
    """Over one connection to the registry, which is made again whenever it is lost."""

    name = "local"
    Config = LocalConfig
    ttl = TTL
    across_hosts = False

    def __init__(self, config: BaseModel, address: str, secret: str, graph: GraphMark | None = None) -> None:
        super().__init__(config, address, secret, graph)
        self._greeting = Greeting(graph="", secret=secret, cluster="", name=f"discovery of process {os.getpid()}")
        self._mine: dict[WorkerKey, Member] = {}
        self._born: dict[WorkerKey, float] = {}
        self._connection: RpcConnection | None = None
        self._connecting = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False

    async def register(self, member: Member) -> None:
        """See the contract. Returns when the registry knows it. Raises `DeadlineExceeded` when the registry is
        away for long (it is still told as soon as it is back), `LaunchError` when a newer epoch stands there."""
        self._mine[member.key] = member
        if self._keeper is None:
            keeper = asyncio.create_task(self._keep(), name="discovery renewals")
            self._keeper = watched(keeper, "the registry is not told any more that members of this process are there")
        try:
            async with asyncio.timeout(REGISTER_TIMEOUT):
                while True:
                    try:
                        return await self.renew(member)
                    except (ConnectionLost, DeadlineExceeded) as error:
                        log.debug("cannot register %s yet: %s", member.key, error)
                        await asyncio.sleep(RETRY)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the registry did not take {member.key} in {REGISTER_TIMEOUT:g} s", where=self.address
            ) from None

    async def renew(self, member: Member) -> None:
        await self._renew(await self._connect(), member)

    async def _renew(self, connection: RpcConnection, member: Member) -> None:
        registration = Registration(member, self._born.setdefault(member.key, now()))
        receipt = await connection.call("discovery.register", registration, Receipt, timeout=self.ttl)
        if not receipt.accepted:
            self._mine.pop(member.key, None)
            raise LaunchError(
                f"{member.key} of epoch {member.key.epoch} has been replaced",
                where=self.address,
                why="a newer process registered in its place",
                fix="end this process",
            )

    async def unregister(self, key: WorkerKey) -> None:
        self._mine.pop(key, None)
        self._born.pop(key, None)
        try:
            async with asyncio.timeout(UNREGISTER_TIMEOUT):
                connection = await self._connect()
                await connection.call("discovery.unregister", Departure(key), type(None), timeout=UNREGISTER_TIMEOUT)
        except (PddError, TimeoutError) as error:
            log.debug("%s is left to expire: %s", key, error)

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """See the contract. Ends when this object is closed.

        A registry that was restarted knows nobody at first: until it has settled, those it has not heard of yet
        are taken from the last view of the one before.
        """
        last: tuple[Member, ...] | None = None
        away = False
        while not self._closed:
            before = last or ()
            heard: set[tuple[str, int]] = set()
            try:
                connection = await self._connect()
                async with connection.stream("discovery.watch", Watch(), View, timeout=None) as views:
                    async for view in views:
                        away = False
                        heard.update((member.key.pool, member.key.index) for member in view.members)
                        members = view.members
                        if not view.settled:
                            unheard = [member for member in before if (member.key.pool, member.key.index) not in heard]
                            members = tuple(sorted([*members, *unheard], key=lambda member: member.key))
                        if members != last:
                            last = members
                            yield members
            except PddError as error:
                if not self._closed:
                    log.log(logging.DEBUG if away else logging.WARNING, "the last view of members stays: %s", error)
                    away = True
                    await asyncio.sleep(RETRY)

    async def close(self) -> None:
        """Members of this process are unregistered."""
        for key in list(self._mine):
            await self.unregister(key)
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        if self._connection is not None:
            await self._connection.close()

    async def _connect(self) -> RpcConnection:
        async with self._connecting:
            if self._closed:
                raise ConnectionLost("this discovery is closed", where=self.address)
            if self._connection is None or self._connection.closed:
                self._connection = await connect(self.address, self._greeting, tls=self.tls, timeout=self.ttl)
            return self._connection

    async def _keep(self) -> None:
        """Renew everything every third of the ttl, and at once when the connection was lost."""
        while True:
            await self._rest()
            for key in list(self._mine):
                try:
                    connection = await self._connect()
                    if key in self._mine:
                        await self._renew(connection, self._mine[key])
                except (ConnectionLost, DeadlineExceeded) as error:
                    log.debug("cannot renew %s: %s", key, error)
                    break
                except PddError as error:
                    log.error("cannot renew %s: %s", key, error)

    async def _rest(self) -> None:
        connection = self._connection
        if connection is None or connection.closed:
            await asyncio.sleep(RETRY)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.ttl / 3):
                await connection.wait_closed()


@hookimpl
def pdd_register_discoveries() -> list[type[Discovery]]:
    return [LocalDiscovery]
