"""A registry that can be taken away and brought back at the same address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pdd_runtime.discovery import LocalDiscovery, RegistryServer
from pdd_runtime.discovery.local import LocalConfig
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcServer
from pdd_runtime.testing.discovery_suite import Views, named
from tests.waiting import PATIENCE

SECRET = "hush-hush"
TTL = 0.6


class QuickDiscovery(LocalDiscovery):
    """Of few patience, for short tests."""

    ttl = TTL


class Site:
    """One launcher's registry, and the discoveries of the processes around it."""

    address: str = ""
    registry: RegistryServer

    def __init__(self) -> None:
        self._discoveries: list[LocalDiscovery] = []
        self._server: RpcServer | None = None

    async def up(self) -> None:
        self._server = RpcServer(Greeting(graph="g", secret=SECRET, cluster="dc-a", name="launcher"))
        self.registry = RegistryServer(self._server, ttl=TTL)
        port = int(self.address.rpartition(":")[2] or 0)
        self.address = await self._server.start("127.0.0.1", port)

    async def down(self) -> None:
        assert self._server is not None
        self.registry.close()
        await self._server.close()
        self._server = None

    def discovery(self, secret: str = SECRET) -> LocalDiscovery:
        """As another process has it."""
        discovery = QuickDiscovery(LocalConfig(), self.address, secret)
        self._discoveries.append(discovery)
        return discovery

    async def close(self) -> None:
        for discovery in self._discoveries:
            await discovery.close()
        if self._server is not None:
            await self.down()

    async def shows(self, *keys: str) -> None:
        """Wait until the registry has exactly these, as pool/index:epoch."""
        async with asyncio.timeout(PATIENCE):
            version = self.registry.version
            while [named(member) for member in self.registry.members()] != list(keys):
                version = await self.registry.changed(version)


@pytest.fixture
def member() -> Callable[..., Member]:
    def make(pool: str = "main", index: int = 0, epoch: str = "e1", state: Any = "ready") -> Member:
        return Member(
            key=WorkerKey(pool, index, epoch),
            role="main",
            cluster="dc-a",
            state=state,
            pid=1,
            endpoint="127.0.0.1:1",
        )

    return make


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.up()
    yield site
    await site.close()


@pytest.fixture
async def watch() -> AsyncIterator[Callable[[LocalDiscovery], Views]]:
    watching: list[Views] = []

    def start(discovery: LocalDiscovery) -> Views:
        watching.append(Views(discovery))
        return watching[-1]

    yield start
    for views in watching:
        views.task.cancel()
        await asyncio.wait([views.task])
