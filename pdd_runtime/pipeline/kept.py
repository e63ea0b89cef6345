"""KV that a worker keeps for one reader: what a session knows of an engine's offer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.legs import Leg, worker_lost
from pdd_runtime.pipeline.token_log import Source
from pdd_runtime.plugins.engine import Offer, OfferRequest

if TYPE_CHECKING:
    from pdd_runtime.pipeline.session import Session


class Kept:
    """One offer, from the asking until its reader has all. What fails where the KV is kept fails its reader."""

    def __init__(self, session: Session, source: Source, target: Source, tokens: tuple[int, ...], id: str) -> None:
        """`id`: the reader's request."""
        self._session, self._tokens = session, tokens
        self._giver, self._taker = session.workers[source], session.workers[target]
        self._to_main = (source, target) == ("prefill", "main")
        self._read = False
        request = OfferRequest(
            id=f"{id}.{target}",
            tokens=tokens,
            sampling=session.request.sampling,
            salt=session.request.salt,
            reader=self._taker.key.pool,
            timeout=deadlines.FETCH,
        )
        doing = f"keeping KV for {self._taker}"
        self._leg: Leg[Offer] = session.leg(source, doing, "engine.offer", request, Offer, deadlines.PREFILL)
        self._record = session.timeline.transfer(self._giver.key.pool, self._taker.key.pool)
        session.timeline.event(self._taker, f"KV from {self._giver.key.pool} starts")

    async def offer(self) -> Offer:
        """What the reader needs."""
        async for offer in self._leg:
            self._leg.patience = deadlines.FETCH
            return offer
        raise EngineError(f"{self._leg.doing}: the stream ended without an offer", where=f"worker {self._giver}")

    def mind(self, reader: Leg[Any]) -> None:
        """From here on, `reader` reads it."""
        self._session.beside(self._mind(reader))

    def read(self, cached: int, received: int) -> None:
        """The reader has all: `cached` tokens' KV was there, that of `received` has come."""
        self._read = True
        record, timeline = self._record, self._session.timeline
        record.blocks_cached, record.bytes_cached = self._taker.blocks_in(cached), cached * self._giver.token_bytes
        record.blocks_sent, record.bytes = self._taker.blocks_in(received), received * self._giver.token_bytes
        record.finished = timeline.elapsed
        record.goodput = record.bytes / max(1e-6, record.finished - record.started)
        if self._to_main and timeline.cached.main is None:
            timeline.cached.main = min(cached, len(self._session.prompt))
        what = f"KV from {self._giver.key.pool} ends: {cached + received} tokens are there, {received} of them new"
        timeline.event(self._taker, what)
        self._session.beside(self._close_soon())

    async def close(self) -> None:
        await self._leg.close()

    async def cause(self, error: EngineError) -> PddError:
        """Why its reader failed with `error`: the giver's death, which its own connection may tell a moment later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadlines.DEATH):
                await self._giver.connection.wait_closed()
            return worker_lost(self._giver, self._leg.doing)
        return error

    async def _mind(self, reader: Leg[Any]) -> None:
        try:
            async for _ in self._leg:
                pass
        except PddError as error:
            if not self._read:
                reader.fail(error)
        finally:
            await self._leg.close()

    async def _close_soon(self) -> None:
        """It ends by itself where the engine knows that it was read."""
        await asyncio.sleep(deadlines.NOTICED)
        await self._leg.close()
