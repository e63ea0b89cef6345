"""How a session brings KV from worker to worker: as blocks over a transport, or by what the engines have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdd_runtime.errors import CapacityError, DeadlineExceeded, EngineError, PddError, TransferError, WorkerLost
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.token_log import Source
from pdd_runtime.plugins.engine import Received, ReceiveRequest
from pdd_runtime.plugins.messages import Fetched, FetchEvent, Fetching, FetchProgress, FetchRequest

if TYPE_CHECKING:
    from pdd_runtime.pipeline.peers import Peer
    from pdd_runtime.pipeline.session import Session


class Held(Protocol):
    """Keeps KV on a worker until it is closed."""

    async def close(self) -> None: ...


class Nothing:
    """Nothing is held."""

    async def close(self) -> None:
        return


async def bring(session: Session, source: Source, target: Source, tokens: tuple[int, ...]) -> tuple[Held, int]:
    """Bring the KV of `tokens`. Returns what keeps it there, and how many leading tokens' KV is there. Where it cannot
    be moved, that is less: the engine computes it. Nothing is done for an engine that is assisted: each of its decodes
    brings what it needs."""
    giver, taker = session.workers[source], session.workers[target]
    if taker.assisted:
        return Nothing(), 0
    transport = session.edges.transport(giver.key.pool, taker.key.pool)
    if transport is None:
        return await _receive(session, source, target, tokens)
    return await _fetch(session, source, target, tokens, transport)


async def _fetch(
    session: Session, source: Source, target: Source, tokens: tuple[int, ...], transport: str
) -> tuple[Held, int]:
    """Blocks, by the agents."""
    giver, taker = session.workers[source], session.workers[target]
    request = FetchRequest(
        id=session.id,
        tokens=tokens,
        transport=transport,
        endpoint=giver.member.transports.get(transport, ""),
        epoch=giver.key.epoch,
        source=giver.key.pool,
        layout=giver.member.info.layout if giver.member.info else None,
        salt=session.request.salt,
        timeout=deadlines.FETCH,
    )
    doing = f"receiving KV from {giver}"
    leg: Leg[FetchEvent] = session.leg(target, doing, "kv.fetch", request, FetchEvent, deadlines.FETCH + deadlines.CALL)
    record = session.timeline.transfer(giver.key.pool, taker.key.pool)
    session.timeline.event(taker, f"KV from {giver.key.pool} starts")
    there = 0
    try:
        with session.watching(source, f"sending KV to {taker}"):
            async for event in leg:
                match event:
                    case Fetching(blocks_cached):
                        record.blocks_cached = blocks_cached
                        there_already = min(taker.tokens_in(blocks_cached), len(tokens))
                        record.bytes_cached = giver.token_bytes * there_already
                        if target == "main" and source == "prefill":
                            session.timeline.cached.main = min(there_already, len(session.prompt))
                    case FetchProgress(blocks, size):
                        record.blocks_sent, record.bytes = blocks, size
                    case Fetched(report, there):
                        record.blocks_sent, record.bytes = report.blocks, report.bytes
                        record.goodput, record.finished = report.goodput, session.timeline.elapsed
                        session.timeline.event(taker, f"KV from {giver.key.pool} ends: {there} tokens are there")
                        break
    except (TransferError, DeadlineExceeded, CapacityError) as error:
        _failed(session, giver, taker, error)
        await leg.close()
    return leg, there


async def _receive(session: Session, source: Source, target: Source, tokens: tuple[int, ...]) -> tuple[Held, int]:
    """By the engines: one keeps it, the other reads it."""
    giver, taker = session.workers[source], session.workers[target]
    id = f"{session.id}.kv"
    kept = await session.keep(source, target, tokens, id)
    leg: Leg[Received] | None = None
    try:
        request = ReceiveRequest(
            id=id,
            tokens=tokens,
            sampling=session.request.sampling,
            salt=session.request.salt,
            offer=await kept.offer(),
            timeout=deadlines.FETCH,
        )
        doing = f"receiving KV from {giver}"
        leg = session.leg(target, doing, "engine.receive", request, Received, deadlines.FETCH + deadlines.CALL)
        kept.mind(leg)
        async for received in leg:
            kept.read(received.cached, received.received)
            return leg, received.cached + received.received
        raise EngineError(f"{doing}: the stream ended with nothing received", where=f"worker {taker}")
    except (EngineError, TransferError, DeadlineExceeded, CapacityError, WorkerLost) as error:
        if isinstance(error, WorkerLost) and not giver.connection.closed:
            raise
        # With the giver lost as well: the first token is out, and all else the reader can compute.
        _failed(session, giver, taker, error)
        if leg is not None:
            await leg.close()
        await kept.close()
    return Nothing(), 0


def _failed(session: Session, giver: Peer, taker: Peer, error: PddError) -> None:
    session.timeline.event(taker, f"KV from {giver.key.pool} failed: {error}; it will be recomputed")
