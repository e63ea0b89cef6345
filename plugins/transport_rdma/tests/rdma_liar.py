"""A sender that says what is not so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from pdd_rdma.config import RdmaConfig
from pdd_rdma.exposure import Exposure
from pdd_rdma.library import load
from pdd_rdma.memory import MemoryType
from pdd_rdma.wire import FEED, MEET, TAKEN, Ask, Meet, Meeting, Offer, Offered, Taken, checksum

from pdd_runtime.errors import TransferError
from pdd_runtime.rpc import RpcContext, RpcServer
from pdd_runtime.testing.kv_parties import Context, StoreSource

Lie = Callable[[int, Offered], Offered]
"""Gets the number of the session, from 0, and what is true."""


@asynccontextmanager
async def liar(source: StoreSource, lie: Lie, *, holds: bool = True) -> AsyncIterator[str]:
    """Its endpoint. What it offers is all there; where it does not hold blocks, it says so when they are taken."""
    exposure = Exposure(load(RdmaConfig(tls="all")), source.store.buffer(), MemoryType(), "liar", progresses=False)
    agent, metadata = await asyncio.wrap_future(exposure.open())
    exposure.stir(True)
    sessions = 0
    unsettled: dict[bytes, int] = {}
    settled = asyncio.Event()

    async def meet(asked: Meet, rpc: RpcContext) -> Meeting:
        region = exposure.region
        return Meeting(agent=agent, metadata=metadata, address=region.address, size=region.size, kind="DRAM", device=0)

    async def feed(ask: Ask, rpc: RpcContext) -> AsyncGenerator[Offer, None]:
        nonlocal sessions
        session, sessions = sessions, sessions + 1
        source.opened.append(ask.subscription)
        unsettled[ask.fetch] = len(ask.subscription.blocks)
        yield Offer()
        for index, block in enumerate(ask.subscription.blocks):
            number = source.store.find(block.name)
            assert number is not None
            true = Offered(index, number, checksum(block.name, source.store.memory(number)))
            yield Offer([lie(session, true)])
        while unsettled[ask.fetch]:
            settled.clear()
            await settled.wait()

    async def taken(what: Taken, rpc: RpcContext) -> int:
        if not holds:
            raise TransferError("no such fetch is served here")
        unsettled[what.fetch] -= len(what.indices)
        settled.set()
        return len(what.indices)

    server = RpcServer(Context("dc-a").greeting)
    server.unary(MEET, Meet, meet)
    server.unary(TAKEN, Taken, taken)
    server.stream(FEED, Ask, feed)
    try:
        yield await server.start("127.0.0.1")
    finally:
        await server.close()
        await asyncio.to_thread(exposure.close)
