"""How a session brings KV from worker to worker: as blocks over a transport, or by what the engines have for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdd_runtime.clock import now
from pdd_runtime.errors import CapacityError, DeadlineExceeded, EngineError, PddError, TransferError, WorkerLost
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.token_log import Source
from pdd_runtime.plugins.engine import Received, ReceiveRequest
from pdd_runtime.plugins.messages import Fetched, FetchEvent, Fetching, FetchProgress, FetchRequest
from pdd_runtime.plugins.routing import WorkerKey

if TYPE_CHECKING:
    from pdd_runtime.pipeline.part import Part
    from pdd_runtime.pipeline.peers import Peer
    from pdd_runtime.pipeline.sender import Fetch
    from pdd_runtime.pipeline.session import Session


class Held(Protocol):
    """Keeps KV on a worker until it is closed."""

    async def close(self) -> None: ...


class Nothing:
    """Nothing is held."""

    async def close(self) -> None:
        return


async def bring(part: Part, source: Source, target: Source, tokens: tuple[int, ...]) -> tuple[Held, int]:
    """Bring the KV of `tokens`. Returns what keeps it there, and how many leading tokens' KV is there. Where it cannot
    be moved, as where no edge leads from a worker to one that has taken another's place, that is less: the engine
    computes it. Nothing is done for an engine that is assisted: each of its decodes
    brings what it needs. A prefill worker that fails is followed by another that has the prompt's KV."""
    session = part.session
    giver, taker = session.crew.get(source), session.crew[target]
    tried: set[WorkerKey] = set()

    def other() -> Peer | None:
        if source != "prefill" or not session.log:
            return None
        there = session.planner.cached(session.request, taker)
        return session.planner.holder(session.request, taker, there, tried)

    if taker.assisted:
        return Nothing(), 0
    if giver is None or not session.edges.feeds(giver.key.pool, taker.key.pool):
        giver = other()
    while giver is not None:
        tried.add(giver.key)
        try:
            with giver.gives():
                return await _move(part, giver, taker, source, tokens)
        except (EngineError, TransferError, DeadlineExceeded, CapacityError, WorkerLost) as error:
            if isinstance(error, WorkerLost) and error.worker is not giver:
                raise
            full = isinstance(error, DeadlineExceeded | CapacityError)
            failed, giver = giver, None if full else other()
            then = f"{giver} has it as well" if giver else "it will be recomputed"
            session.timeline.event(taker, f"KV from {failed.key.pool} failed: {error}; {then}")
            if isinstance(error, WorkerLost) and session.log:
                session.replaced(error, giver or taker)
    return Nothing(), 0


async def _move(part: Part, giver: Peer, taker: Peer, source: Source, tokens: tuple[int, ...]) -> tuple[Held, int]:
    session = part.session
    if source == "prefill" and giver is not session.prompt_at:
        # Nobody prefills it there now: what is not there would be waited for in vain.
        tokens = tokens[: session.planner.cached(session.request, giver)]
        if not tokens:
            return Nothing(), 0
    transport = session.edges.transport(giver.key.pool, taker.key.pool)
    if transport is None:
        return await _receive(part, giver, taker, tokens)
    return await _fetch(part, giver, taker, source, tokens, transport)


async def _fetch(
    part: Part, giver: Peer, taker: Peer, source: Source, tokens: tuple[int, ...], transport: str
) -> tuple[Held, int]:
    """Blocks, by the agents."""
    session = part.session
    request = FetchRequest(
        id=session.prompt_id,
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
    leg: Leg[FetchEvent] = part.leg(taker, doing, "kv.fetch", request, FetchEvent, deadlines.FETCH + deadlines.CALL)
    record = session.timeline.transfer(giver.key.pool, taker.key.pool)
    session.timeline.event(taker, f"KV from {giver.key.pool} starts")
    try:
        with (
            part.guarding(leg, giver, source, f"sending KV to {taker}"),
            giver.sends(taker.member.cluster) as fetch,
        ):
            if giver.member.cluster != taker.member.cluster:
                part.beside(_made(session, fetch))
            async for event in leg:
                match event:
                    case Fetching(blocks_cached):
                        record.blocks_cached = blocks_cached
                        there_already = min(taker.tokens_in(blocks_cached), len(tokens))
                        record.bytes_cached = giver.token_bytes * there_already
                        if source == "prefill" and taker is session.crew.get("main"):
                            session.cached_on_main(there_already)
                    case FetchProgress(blocks, size):
                        record.blocks_sent, record.bytes = blocks, size
                        fetch.has(size, now())
                    case Fetched(report, there):
                        record.blocks_sent, record.bytes = report.blocks, report.bytes
                        fetch.has(report.bytes, now())
                        record.goodput, record.finished = report.goodput, session.timeline.elapsed
                        session.timeline.event(taker, f"KV from {giver.key.pool} ends: {there} tokens are there")
                        return leg, there
        raise leg.ended("all of it")
    except PddError:
        await leg.close()
        raise


async def _made(session: Session, fetch: Fetch) -> None:
    await session.until(lambda: len(session.log) > 0, "the first token")
    fetch.made(now())


async def _receive(part: Part, giver: Peer, taker: Peer, tokens: tuple[int, ...]) -> tuple[Held, int]:
    """By the engines: one keeps it, the other reads it."""
    session = part.session
    id = f"{part.id}.kv"
    kept = await part.keep(giver, taker, tokens, id)
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
        leg = part.leg(taker, doing, "engine.receive", request, Received, deadlines.FETCH + deadlines.CALL)
        kept.mind(leg)
        async for received in leg:
            kept.read(received.cached, received.received)
            return leg, received.cached + received.received
        raise leg.ended("anything received")
    except PddError:
        if leg is not None:
            await leg.close()
        await kept.close()
        raise
