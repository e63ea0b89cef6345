"""One worker: the engine's host, and everything beside the engine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from pdd_runtime.discovery import open_discovery
from pdd_runtime.errors import EngineError, GraphError, PddError
from pdd_runtime.graph import Graph
from pdd_runtime.graph.secrets import revealed, values
from pdd_runtime.kv import BlockStore, CachedNames, KvLayout
from pdd_runtime.observe import serve_vitals
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.engine import Engine, EngineInfo, ModelSpec
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.rpc import Greeting, Line, RpcServer
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.agent import Agent
from pdd_runtime.worker.farewell import Farewell
from pdd_runtime.worker.plane import NativePlane, Plane, PortablePlane
from pdd_runtime.worker.service import Service
from pdd_runtime.worker.source import Source
from pdd_runtime.worker.store import WorkerStore
from pdd_runtime.worker.transports import Transports

log = logging.getLogger(__name__)

ENDING = 1.0
"""Seconds for streams that are cut off to end."""

State = Literal["starting", "ready", "draining"]


class Worker:
    """The `EngineHost` of its engine and the `TransportContext` of its transports. `start`, perhaps `drain`, `close`;
    others see its state in discovery."""

    def __init__(
        self,
        graph: Graph,
        key: WorkerKey,
        *,
        registry: str,
        secret: str,
        succeeds: tuple[str, ...] = (),
        replaces: bool = False,
    ) -> None:
        """`registry`: the address that discovery is given. The graph says where its cluster's workers listen.
        `succeeds`: digests of what it was before.
        `replaces`: another worker has its place until this one is ready, and is seen there until then. Raises
        `GraphError`."""
        if key.pool not in graph.spec.pools:
            raise GraphError(f'there is no pool "{key.pool}"', why=f"the pools are: {', '.join(graph.spec.pools)}")
        self.graph, self.key = graph, key
        self._pool = graph.spec.pools[key.pool]
        self.cluster = self._pool.cluster
        self._address = graph.spec.clusters[self.cluster]
        self._registry, self._secret = registry, secret
        self._succeeds, self._replaces = succeeds, replaces
        self._lines = Lines(graph, self.cluster)
        self.greeting = Greeting(graph=graph.name, secret=secret, cluster=self.cluster, name=str(key), epoch=key.epoch)
        self.tls = tls_of(graph, self.cluster)
        self._server = RpcServer(self.greeting, self._lines.to, tls=self.tls, hide=values(graph.spec.model_dump()))
        self._lines.serve(self._server)
        serve_vitals(self._server)
        self._activity, self._farewell = Activity(), Farewell()
        self._failure: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._member: Member | None = None
        # What exists from some point of `start` on.
        self._store: WorkerStore | None = None
        self._names: CachedNames | None = None
        self._discovery: Discovery | None = None
        self._engine: Engine | None = None
        self._transports: Transports | None = None
        self._plane: Plane | None = None
        self._service: Service | None = None
        self._draining: asyncio.Task[bool] | None = None

    async def start(self) -> None:
        """Load the model and serve. Raises a `PddError`; `close` it then, too."""
        plugins = load_plugins(lazily=True)
        self._engine = self._make_engine(plugins)
        self._transports = Transports(self.graph, self.key.pool, plugins, self)
        self._discovery = open_discovery(self.graph, plugins, self._registry, self._secret, self.tls, self._succeeds)
        endpoint = await self._server.start(self._address.host)
        self._member = Member(
            key=self.key,
            role=self._pool.role,
            cluster=self.cluster,
            state="starting",
            pid=os.getpid(),
            endpoint=self._address.reached(endpoint),
        )
        if not self._replaces:
            await self._discovery.register(self._member)
        info = await self._start_engine(self._engine)
        self._plane, addresses = await self._make_plane(info, self._transports)
        self._service = Service(self._engine, self._plane, self._activity, self._farewell, self.drain)
        self._service.register(self._server)
        self._server.greeting = msgspec.structs.replace(self._server.greeting, fingerprint=info.fingerprint)
        self._member = msgspec.structs.replace(self._member, transports=addresses, info=info)
        await self._announce("ready")
        log.info("%s is ready at %s: %s, %d blocks", self.key, endpoint, info.model, info.capacity_blocks)

    async def failed_for_good(self) -> EngineError:
        """Return when the engine can serve nothing more, with the reason."""
        return await asyncio.shield(self._failure)

    async def drain(self, patience: float) -> bool:
        """Say that no new session is taken; what has begun goes on, and gets from here what it still needs. True:
        nothing is left, everybody has left who watched, and all requests have ended, those included whose blocks others
        still fetch from here. False: what was left after `patience` seconds was ended with `Cancelled`. The first
        call's patience holds."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(patience), name="drain")
        return await asyncio.shield(self._draining)

    async def close(self) -> None:
        """Leave discovery, end every request and transfer, free everything. Idempotent."""
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])
        if self._discovery is not None:
            await self._step("discovery", self._discovery.close)
        await self._step("message plane", self._server.close)
        if self._plane is not None:
            await self._step("KV plane", self._plane.close)
        if self._transports is not None:
            await self._step("transports", self._transports.close)
        if self._engine is not None:
            await self._step("engine", self._engine.close)
        if self._store is not None and self._store.stats.used:
            log.error("%d blocks are still in use after everything has ended", self._store.stats.used)

    # For the engine.

    def open_store(self, layout: KvLayout, blocks: int, *, shared: bool = False) -> BlockStore:
        if self._store is not None or self._names is not None:
            raise EngineError("the engine opened its store twice, or beside names")
        self._store = WorkerStore(layout, blocks, shared=shared)
        return self._store

    def open_names(self, layout: KvLayout) -> CachedNames:
        if self._names is not None or self._store is not None:
            raise EngineError("the engine opened its names twice, or beside a store")
        self._names = CachedNames(layout)
        return self._names

    def failed(self, error: EngineError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    # For the transports.

    @property
    def memory(self) -> memoryview:
        return self._opened_store().buffer()

    def line_to(self, cluster: str) -> Line | None:
        return self._lines.to(cluster)

    def link_to(self, cluster: str) -> LinkFacts | None:
        return self._lines.link(cluster)

    def _make_engine(self, plugins: PluginManager) -> Engine:
        cls = plugins.engine(self._pool.engine.plugin)
        where = f"spec.pools.{self.key.pool}.engine.config"
        config = plugins.configure(cls, revealed(self._pool.engine.config, where), where=where)
        engine: Engine = cls(config, ModelSpec(**self.graph.model_of(self.key.pool).model_dump()))
        engine.role = self._pool.role
        return engine

    async def _start_engine(self, engine: Engine) -> EngineInfo:
        try:
            return await engine.start(self)
        except PddError:
            raise
        except Exception as error:
            raise EngineError(
                f"engine {engine.name} could not start",
                where=f"worker {self.key}",
                why=f"{type(error).__name__}: {error}",
            ) from error

    async def _make_plane(self, info: EngineInfo, transports: Transports) -> tuple[Plane, dict[str, str]]:
        """With where its transports are served. Raises `EngineError` where the engine has opened something else than
        what it says its KV to be, `GraphError` where an edge says otherwise."""
        opened = "portable" if self._names is None else "native"
        if opened != info.capabilities.kv:
            raise EngineError(
                f"engine {self._pool.engine.plugin} says that its KV is {info.capabilities.kv}",
                where=f"worker {self.key}",
                why=f"it has opened {'a block store' if self._names is None else 'names'}: that is {opened} KV",
            )
        transports.check(opened)
        if self._names is not None:
            return NativePlane(self._names, str(self.key)), {}
        store = self._opened_store()
        source = Source(store, info, self.key.epoch, self._activity, secret=self._secret)
        served = await transports.serve(source, self._address.host)
        addresses = {plugin: self._address.reached(endpoint) for plugin, endpoint in served.items()}
        return PortablePlane(
            store, Agent(store, info, self.cluster, source, secret=self._secret), transports
        ), addresses

    def _opened_store(self) -> WorkerStore:
        if self._store is None:
            raise EngineError(f"engine {self._pool.engine.plugin} opened no block store", where=f"worker {self.key}")
        return self._store

    async def _drain(self, patience: float) -> bool:
        assert self._engine is not None
        assert self._plane is not None
        assert self._service is not None
        self._farewell.say()
        telling = asyncio.create_task(self._tell_draining(), name="telling discovery")
        try:
            async with asyncio.timeout(patience):
                await self._farewell.alone()
                self._plane.refuse(f"worker {self.key} is draining")
                await self._engine.drain()
                await self._plane.idle()
                return True
        except TimeoutError:
            log.warning("%s drained for %g s: what still runs ends now", self.key, patience)
            await self._service.end(f"worker {self.key} stops", ENDING)
            return False
        finally:
            telling.cancel()
            await asyncio.wait([telling])

    async def _tell_draining(self) -> None:
        try:
            await self._announce("draining")
        except PddError as error:
            # Another one may stand in its place already, and nothing can be done about the rest.
            log.info("discovery is not told that %s drains: %s", self.key, error.what)

    async def _announce(self, state: State) -> None:
        assert self._discovery is not None
        assert self._member is not None
        self._member = msgspec.structs.replace(self._member, state=state)
        await self._discovery.register(self._member)

    async def _step(self, what: str, close: Callable[[], Awaitable[None]]) -> None:
        """One part that does not close must not keep the others from it."""
        try:
            await close()
        except Exception:
            log.exception("%s did not close", what)
