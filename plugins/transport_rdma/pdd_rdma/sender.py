"""The serving side: says which blocks can be read, and holds them until they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from pdd_rdma.config import RdmaConfig
from pdd_rdma.exposure import Exposure
from pdd_rdma.library import MakeAgent
from pdd_rdma.memory import memory_type
from pdd_rdma.meter import Meter
from pdd_rdma.session import Session
from pdd_rdma.wire import BLOCKS_LIMIT, FEED, MEET, TAKEN, VERSION, Ask, Meet, Meeting, Offer, Taken
from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.plugins.transport import BlockSource, LinkTelemetry, TransportContext
from pdd_runtime.rpc import RpcContext, RpcServer

SESSIONS = 256
"""At once, each with a thread until all its blocks are offered; more wait their turn."""


class Sender:
    """Feeds every receiver that subscribes, from one `BlockSource`. On the loop."""

    def __init__(self, make: MakeAgent, config: RdmaConfig, context: TransportContext) -> None:
        self._make, self._config, self._context = make, config, context
        self._server: RpcServer | None = None
        self._exposure: Exposure | None = None
        self._sessions: dict[bytes, Session] = {}
        self._meters: dict[str, Meter] = {}
        self._turns = asyncio.Semaphore(SESSIONS)
        self._count = 0

    async def start(self, source: BlockSource, host: str) -> str:
        """Expose the worker's blocks and listen on a free port. Raises `TransferError`."""
        memory = self._context.memory
        self._exposure = exposure = Exposure(
            self._make,
            memory,
            memory_type(memory),
            "pdd-rdma-expose",
            progresses=self._config.progress_thread,
        )
        try:
            agent, metadata = await asyncio.wrap_future(exposure.open())
        except Exception as error:
            raise unusable(error) from error
        meeting = Meeting(
            agent=agent,
            metadata=metadata,
            address=exposure.region.address,
            size=exposure.region.size,
            kind=exposure.type.kind,
            device=exposure.type.device,
        )

        async def meet(asked: Meet, rpc: RpcContext) -> Meeting:
            if asked.version != VERSION:
                raise TransferError(
                    f"the peer speaks version {asked.version} of the protocol, and this side version {VERSION}",
                    fix="run one version on both sides",
                )
            return meeting

        def feed(ask: Ask, rpc: RpcContext) -> AsyncGenerator[Offer, None]:
            return self._feed(ask, source, exposure)

        self._server = RpcServer(self._context.greeting, tls=self._context.tls)
        self._server.unary(MEET, Meet, meet)
        self._server.unary(TAKEN, Taken, self._taken)
        self._server.stream(FEED, Ask, feed)
        try:
            return await self._server.start(host)
        except PddError as error:
            raise TransferError(error.what, where=error.where, why=error.why, fix=error.fix) from error

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        return tuple(meter.telemetry() for meter in self._meters.values())

    async def close(self) -> None:
        """End every session; nothing is held any more. Idempotent."""
        if self._server is not None:
            await self._server.close()
        if self._exposure is not None:
            await asyncio.to_thread(self._exposure.close)

    async def _feed(self, ask: Ask, source: BlockSource, exposure: Exposure) -> AsyncGenerator[Offer, None]:
        self._check(ask)
        async with self._turns:
            self._count += 1
            cluster = ask.subscription.cluster
            meter = self._meters.setdefault(cluster, Meter(cluster))
            session = Session(ask, source, exposure.region, meter, f"pdd-rdma-feed-{self._count}")
            self._sessions[ask.fetch] = session
            try:
                async for offer in session.offers():
                    self._stir(exposure)
                    yield offer
            finally:
                del self._sessions[ask.fetch]
                self._stir(exposure)
                await session.close()

    async def _taken(self, taken: Taken, rpc: RpcContext) -> int:
        session = self._sessions.get(taken.fetch)
        if session is None or self._exposure is None:
            raise TransferError("no such fetch is served here")
        session.taken(taken.indices)
        self._stir(self._exposure)
        return len(taken.indices)

    def _check(self, ask: Ask) -> None:
        where, count = ask.subscription.request_id, len(ask.subscription.blocks)
        if not 1 <= count <= BLOCKS_LIMIT or not 0.0 < ask.subscription.deadline < 1e7 or len(ask.fetch) != 16:
            raise TransferError(
                "the peer sent a subscription that cannot be meant", where=where, fix="run one version on both sides"
            )
        if ask.fetch in self._sessions:
            raise TransferError("the fetch is served already", where=where)
        if self._context.line_to(ask.subscription.cluster) is not None:
            raise TransferError(
                f"transport rdma does not emulate the link to {ask.subscription.cluster}",
                where=where,
                why="a device reads memory at its own pace",
                fix="use transport tcp on this edge, or set emulate: false on the link",
            )

    def _stir(self, exposure: Exposure) -> None:
        exposure.stir(any(session.held for session in self._sessions.values()))


def unusable(error: Exception) -> TransferError:
    """NIXL is there, and does not work."""
    return TransferError(
        "NIXL cannot be used",
        why=str(error),
        fix="see UCX's words in this worker's log; UCX_LOG_LEVEL=info in its environment says more",
    )
