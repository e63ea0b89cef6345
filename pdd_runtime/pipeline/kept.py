"""KV that a worker keeps for one reader: what a session knows of an engine's offer."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.recovery import worker_lost
from pdd_runtime.plugins.engine import Offer, OfferRequest

if TYPE_CHECKING:
    from pdd_runtime.pipeline.part import Part


class Kept:
    """One offer, from the asking until its reader has all. What fails where the KV is kept fails its reader."""

    def __init__(self, part: Part, giver: Peer, taker: Peer, tokens: tuple[int, ...], id: str) -> None:
        """`id`: the reader's request."""
        self._part, self._session, self._giver, self._taker = part, part.session, giver, taker
        self._read = False
        request = OfferRequest(
            id=f"{id}.{taker.key.pool}",
            tokens=tokens,
            sampling=self._session.request.sampling,
            salt=self._session.request.salt,
            reader=taker.key.pool,
            timeout=deadlines.FETCH,
        )
        doing = f"keeping KV for {taker}"
        self._leg: Leg[Offer] = part.leg(giver, doing, "engine.offer", request, Offer, deadlines.PREFILL)
        self._record = self._session.timeline.transfer(giver.key.pool, taker.key.pool)
        self._session.timeline.event(taker, f"KV from {giver.key.pool} starts")

    async def offer(self) -> Offer:
        """What the reader needs."""
        with self._part.guarding(self._leg, self._giver, "prefill", self._leg.doing):
            async for offer in self._leg:
                self._leg.patience = deadlines.FETCH
                return offer
        raise self._leg.ended("an offer")

    def mind(self, reader: Leg[Any]) -> None:
        """From here on, `reader` reads it."""
        self._part.beside(self._mind(reader))

    def read(self, cached: int, received: int) -> None:
        """The reader has all: `cached` tokens' KV was there, that of `received` has come."""
        self._read = True
        record, timeline = self._record, self._session.timeline
        record.blocks_cached, record.bytes_cached = self._taker.blocks_in(cached), cached * self._giver.token_bytes
        record.blocks_sent, record.bytes = self._taker.blocks_in(received), received * self._giver.token_bytes
        record.finished = timeline.elapsed
        record.goodput = record.bytes / max(1e-6, record.finished - record.started)
        if self._taker is self._session.crew.get("main"):
            self._session.cached_on_main(cached)
        what = f"KV from {self._giver.key.pool} ends: {cached + received} tokens are there, {received} of them new"
        timeline.event(self._taker, what)
        self._part.beside(self._close_soon())

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
            with self._part.guarding(self._leg, self._giver, "prefill", self._leg.doing):
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
