"""The data plane of a server that moves KV itself: requests over HTTP, and names of what it says that it has cached."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.kv import CachedNames, Stats, chain, seed
from pdd_runtime.plugins.engine import (
    DecodeRequest,
    EngineHost,
    Offer,
    OfferRequest,
    PrefillRequest,
    Received,
    ReceiveRequest,
)
from pdd_runtime.server.config import ServerConfig
from pdd_runtime.server.geometry import Model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.native_request import NativeRequest, Passed
from pdd_runtime.server.plane import DataPlane, Look, Readings
from pdd_runtime.server.request import Generate, Piece, ServerRequest

log = logging.getLogger(__name__)

WORD_TIME = 1.0
"""Seconds in which a server's word on what it has cached follows its answer."""


class NativePlane(DataPlane):
    """A subclass says how its engine's transfer is asked for:

    - `offer`, `receive`: the two ends of one transfer;
    - `assisted`: a decode whose known tokens all come by an offer, where the engine's `extend` is `prefill_assisted`;
    - `follow`: keep `names` up to date with what the server has cached (`kv_events.py` has a reader).

    Ordinary requests, also those that prefill for an offer to come, are the engine's `generate`, which then asks for no
    transfer. The engine's `look` must say the server's own blocks (`Readings`).
    """

    names: CachedNames
    """From `open` on."""
    model: Model
    """From `open` on."""
    broken: asyncio.Future[EngineError]
    """A subclass may set it."""

    def __init__(self, name: str, config: ServerConfig) -> None:
        self.name, self.config = name, config
        self._http: HttpClient
        self._total = 0
        self._following: asyncio.Task[None] | None = None

    @abstractmethod
    def offering(self, http: HttpClient, id: str, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        """As `Engine.offer`. `id`: for the request at the server. Closing it gives up what is kept for the reader."""

    @abstractmethod
    def receiving(self, http: HttpClient, id: str, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        """As `Engine.receive`, but may end once it has said `Received`: the request stays open by itself."""

    def assisted(
        self, http: HttpClient, id: str, request: DecodeRequest, max_tokens: int
    ) -> AsyncGenerator[Piece, None]:
        """As `ServerEngine.generate`, with `request.offer`."""
        raise RequestError(f"{self.name} computes known tokens itself: it takes no offer with a decode")

    async def follow(self, http: HttpClient) -> None:
        """Keep `names` up to date until cancelled. By default nothing is known of the server's cache."""

    @property
    def told(self) -> str:
        return f"{self.name}, {self._total} blocks of its own"

    async def open(self, host: EngineHost, model: Model, place: Path) -> None:
        self.model, self.broken = model, asyncio.get_running_loop().create_future()
        self.names = host.open_names(model.layout)
        self.socket = self.config.socket or place / "agent"

    async def meet(self, http: HttpClient, look: Look, seconds: float) -> None:
        self._http, self._total = http, (await look()).blocks_total
        if self._total < 1:
            raise EngineError(f"{self.name} does not say how many blocks of KV it has", where=http.url)
        self._following = asyncio.create_task(self._follow(http), name=f"cached by {self.name}")

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    def request(
        self, request: PrefillRequest | DecodeRequest, root: bytes, most: int, generate: Generate
    ) -> ServerRequest:
        if isinstance(request, DecodeRequest) and request.offer is not None:
            decode = request

            def generate(id: str) -> AsyncGenerator[Piece, None]:
                return self.assisted(self._http, id, decode, most)

        return NativeRequest(
            request.id,
            request.tokens,
            generate,
            cached=self.cached(root, request.tokens),
            stop_token_ids=request.sampling.stop_token_ids,
            sealable=isinstance(request, DecodeRequest),
        )

    def root(self, salt: str) -> bytes:
        """Of the names of a tenant's blocks."""
        return seed(self.model.fingerprint, self.model.layout.spec, salt=salt)

    def digest(self, request: DecodeRequest | OfferRequest | ReceiveRequest) -> str:
        """Of the tenant's tokens and their model: the name of the last block, which stands for all before it. Servers
        compare no tokens, so an offer says what it is of."""
        return chain(self.root(request.salt), request.tokens, self.model.layout.block_size)[-1].name.hex()

    async def told_of(
        self,
        root: bytes,
        tokens: Sequence[int],
        n: int,
        *,
        seconds: float = WORD_TIME,
        while_runs: asyncio.Task[None] | None = None,
    ) -> bool:
        """Whether `names` has the first `n` tokens, which the server caches or has just cached: it says so a moment
        after. Waits up to so many seconds for it, and no longer than `while_runs` does where there is such a task."""
        changed = asyncio.Event()
        unsubscribe = self.names.watch(lambda name, added: changed.set())
        if while_runs is not None:
            while_runs.add_done_callback(lambda task: changed.set())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self.names.cached(root, tokens) < n and not (while_runs and while_runs.done()):
                        await changed.wait()
                        changed.clear()
        finally:
            unsubscribe()
        return self.names.cached(root, tokens) >= n

    def offer(self, request: OfferRequest) -> Passed:
        return Passed(request.id, lambda id: self.offering(self._http, id, request), request.timeout)

    def receive(self, request: ReceiveRequest) -> Passed:
        return Passed(request.id, lambda id: self.receiving(self._http, id, request), request.timeout, stays=True)

    def cached(self, root: bytes, tokens: Sequence[int]) -> int:
        return self.names.cached(root, tokens)

    def blocks(self, readings: Readings) -> Stats:
        total = readings.blocks_total or self._total
        cached = min(len(self.names), total - readings.blocks_used)
        return Stats(readings.blocks_used, cached, total - readings.blocks_used - cached, total)

    async def _follow(self, http: HttpClient) -> None:
        """A server that does not say what it has cached serves as well as any; routing knows less."""
        try:
            await self.follow(http)
        except Exception:
            log.exception("what %s has cached is not known any more", self.name)
            self.names.clear()
