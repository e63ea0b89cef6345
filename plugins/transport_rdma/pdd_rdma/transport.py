"""The transport `rdma`: the contract's verbs, over NIXL or what the graph says instead."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from pydantic import BaseModel

from pdd_rdma import endpoint as endpoints
from pdd_rdma.config import RdmaConfig
from pdd_rdma.endpoint import RDMA
from pdd_rdma.fallback import fallback_of
from pdd_rdma.fetch import Fetch
from pdd_rdma.library import MakeAgent, load
from pdd_rdma.memory import memory_type
from pdd_rdma.peers import Peers
from pdd_rdma.readers import Readers
from pdd_rdma.sender import Sender
from pdd_runtime.errors import PluginError, TransferError
from pdd_runtime.plugins.transport import (
    BlockSink,
    BlockSource,
    LinkTelemetry,
    Subscription,
    TransferReport,
    Transport,
    TransportContext,
)
from pdd_runtime.waiting import to_its_end

log = logging.getLogger(__name__)
FETCHES = 256
"""At once; more wait their turn."""


class RdmaTransport(Transport):
    """Bulk KV by one-sided reads. Raises `PluginError` where NIXL or a device is missing and the graph names no
    fallback."""

    name = RDMA
    Config = RdmaConfig

    def __init__(self, config: BaseModel, context: TransportContext) -> None:
        if not isinstance(config, RdmaConfig):
            raise TypeError(f"{type(config).__name__} is no RdmaConfig")
        super().__init__(config, context)
        self._rdma = config
        self._fallback = fallback_of(config, context)
        self._own: _Own | None = None
        try:
            self._own = _Own(load(config), config, context)
        except PluginError as error:
            if self._fallback is None:
                raise
            log.warning("KV goes over transport %s instead of rdma: %s", self._fallback.name, error)
        self._closed = False

    async def serve(self, source: BlockSource, host: str) -> str:
        served = {}
        if self._own is not None:
            served[RDMA] = await self._own.sender.start(source, host)
        if self._fallback is not None:
            served[self._fallback.name] = await self._fallback.serve(source, host)
        return endpoints.written(served)

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        if self._closed:
            raise TransferError("the transport is closed", where=subscription.request_id)
        if not subscription.blocks:
            return TransferReport(bytes=0, blocks=0, gone=0, seconds=0.0)
        addresses = endpoints.read(endpoint)
        if self._own is not None and RDMA in addresses:
            return await self._own.fetch(addresses[RDMA], subscription, sink)
        if self._fallback is not None and self._fallback.name in addresses:
            log.info("request %s: KV comes over transport %s, not rdma", subscription.request_id, self._fallback.name)
            report = await self._fallback.fetch(addresses[self._fallback.name], subscription, sink)
            return msgspec.structs.replace(report, over=self._fallback.name)
        raise TransferError(
            f"nothing joins this worker to {endpoint}",
            where=subscription.request_id,
            why=f"here: {RDMA if self._own else self._fallback and self._fallback.name}; there: {', '.join(addresses)}",
            fix="set the same fallback on every edge of transport rdma, or install NIXL on both sides",
        )

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        own = self._own.sender.telemetry() if self._own is not None else ()
        return (*own, *(self._fallback.telemetry() if self._fallback is not None else ()))

    async def close(self) -> None:
        self._closed = True
        if self._own is not None:
            await self._own.close()
        if self._fallback is not None:
            await self._fallback.close()


class _Own:
    """What there is where NIXL works."""

    def __init__(self, make: MakeAgent, config: RdmaConfig, context: TransportContext) -> None:
        self.sender = Sender(make, config, context)
        self._make, self._config, self._context = make, config, context
        self._turns = asyncio.Semaphore(FETCHES)
        self._fetches: dict[Fetch, asyncio.Task[TransferReport]] = {}
        self._reading: tuple[Readers, Peers] | None = None

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        readers, peers = self._begun()
        fetch = Fetch(endpoint, subscription, sink, self._config, readers, peers)
        late = f"the deadline of {subscription.deadline:g} s has passed"
        alarm = asyncio.get_running_loop().call_later(subscription.deadline, fetch.stop, late)
        task = asyncio.create_task(fetch.run(self._turns), name=f"rdma fetch {subscription.request_id}")
        self._fetches[fetch] = task
        try:
            return await to_its_end(task, lambda: fetch.stop("it was cancelled"))
        finally:
            alarm.cancel()
            del self._fetches[fetch]

    async def close(self) -> None:
        for fetch in self._fetches:
            fetch.stop("the transport was closed")
        if self._fetches:
            await asyncio.wait(self._fetches.values())
        if self._reading is not None:
            readers, peers = self._reading
            await peers.close()
            await asyncio.to_thread(readers.close)
        await self.sender.close()

    def _begun(self) -> tuple[Readers, Peers]:
        if self._reading is None:
            memory = self._context.memory
            readers = Readers(self._make, memory, memory_type(memory), self._config.agents)
            self._reading = readers, Peers(readers, self._context)
        return self._reading
