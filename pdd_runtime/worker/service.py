"""What a worker serves on the message plane."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled
from pdd_runtime.plugins.engine import (
    BlocksReady,
    DecodeEvent,
    DecodeRequest,
    Engine,
    Extended,
    Load,
    Offer,
    OfferRequest,
    PrefillEvent,
    PrefillRequest,
    Received,
    ReceiveRequest,
    Stopped,
    TokenizerFiles,
    Tokens,
)
from pdd_runtime.plugins.messages import Cached, Drain, Empty, FetchEvent, FetchRequest, RequestId, Seal, WatchEvent
from pdd_runtime.rpc import RpcContext, RpcServer
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.farewell import Farewell
from pdd_runtime.worker.plane import Plane
from pdd_runtime.worker.watch import StoreWatch
from pdd_runtime.worker.work import Work

log = logging.getLogger(__name__)


class Service:
    """The handlers. They live as long as their caller's stream: when that is closed, or its connection lost, what
    they hold in engine and agent is freed."""

    def __init__(
        self,
        engine: Engine,
        plane: Plane,
        activity: Activity,
        farewell: Farewell,
        drain: Callable[[float], Awaitable[object]],
    ) -> None:
        """`drain`: of the whole worker, with the patience in seconds."""
        self._engine, self._plane, self._activity = engine, plane, activity
        self._farewell, self._drain = farewell, drain
        self._work = Work()
        self._streams: Counter[str] = Counter()
        """Open ones of the engine, by request."""
        self._end = ""

    def register(self, server: RpcServer) -> None:
        server.stream("engine.prefill", PrefillRequest, self.prefill)
        server.stream("engine.decode", DecodeRequest, self.decode)
        server.stream("engine.offer", OfferRequest, self.offer)
        server.stream("engine.receive", ReceiveRequest, self.receive)
        server.unary("engine.seal", Seal, self.seal)
        server.unary("engine.cancel", RequestId, self.cancel)
        server.unary("engine.cached", Cached, self.cached)
        server.unary("engine.tokenizer", Empty, self.tokenizer)
        server.unary("engine.load", Empty, lambda params, context: self.load())
        server.stream("kv.fetch", FetchRequest, self.fetch)
        server.stream("worker.watch", Empty, self.watch)
        server.unary("worker.drain", Drain, self.drain)
        server.unary("worker.watchers", Empty, self.watchers)

    async def end(self, why: str, patience: float) -> None:
        """Every stream of the engine ends with `Cancelled`, and no other begins. Returns when they have ended, or after
        `patience` seconds."""
        self._end = why
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*(self._engine.cancel(id) for id in tuple(self._streams)), return_exceptions=True)
                while self._streams:  # noqa: ASYNC110 - once in a process's life
                    await asyncio.sleep(0.01)

    async def prefill(self, request: PrefillRequest, context: RpcContext) -> AsyncGenerator[PrefillEvent, None]:
        begun = now()
        with (
            self._activity.publishing(request.id),
            self._stream(request.id),
            self._work.prefill(_caller(context)) as prompt,
        ):
            async with aclosing(self._engine.prefill(request)) as events:
                async for event in events:
                    if isinstance(event, BlocksReady):
                        prompt.tokens = event.tokens - event.cached
                    elif isinstance(event, Tokens):
                        tokens = len(request.tokens)
                        log.info("request %s: prefilled %d tokens in %.3f s", request.id, tokens, now() - begun)
                    yield event

    async def decode(self, request: DecodeRequest, context: RpcContext) -> AsyncGenerator[DecodeEvent, None]:
        begun, extended, took = now(), Extended(0, 0, 0), 0.0
        with (
            self._activity.publishing(request.id) as published,
            self._stream(request.id),
            self._work.decode(_caller(context)) as prompt,
        ):
            async with aclosing(self._engine.decode(request)) as events:
                async for event in events:
                    if isinstance(event, Extended):
                        extended, took = event, now() - begun
                        prompt.tokens = event.computed
                        self._work.computed(prompt)
                    elif isinstance(event, Stopped):
                        # Held or not: no block comes after this.
                        published()
                        log.info(
                            "request %s: made %d tokens, %s; before that extended %d tokens behind %d in %.3f s",
                            *(request.id, event.tokens - len(request.tokens), event.reason),
                            *(extended.computed, extended.cached, took),
                        )
                    yield event

    async def offer(self, request: OfferRequest, context: RpcContext) -> AsyncGenerator[Offer, None]:
        begun = now()
        with self._activity.publishing(request.id), self._stream(request.id):
            async with aclosing(self._engine.offer(request)) as offers:
                async for offer in offers:
                    log.info("request %s: offers %d tokens to %s", request.id, len(request.tokens), request.reader)
                    yield offer
            log.info("request %s: %s has read them after %.3f s", request.id, request.reader, now() - begun)

    async def receive(self, request: ReceiveRequest, context: RpcContext) -> AsyncGenerator[Received, None]:
        begun = now()
        with self._activity.publishing(request.id), self._stream(request.id):
            async with aclosing(self._engine.receive(request)) as events:
                async for event in events:
                    log.info(
                        "request %s: received %d tokens behind %d in %.3f s",
                        *(request.id, event.received, event.cached, now() - begun),
                    )
                    yield event

    async def seal(self, request: Seal, context: RpcContext) -> None:
        await self._engine.seal(request.id, request.tokens)

    async def cancel(self, request: RequestId, context: RpcContext) -> None:
        await self._engine.cancel(request.id)

    async def cached(self, request: Cached, context: RpcContext) -> int:
        return await self._engine.cached(request.tokens, request.salt)

    async def tokenizer(self, request: Empty, context: RpcContext) -> TokenizerFiles:
        return await self._engine.tokenizer()

    async def load(self) -> Load:
        engine = await self._engine.load()
        self._work.limit = max(1, engine.batch_limit)
        engine = msgspec.structs.replace(
            engine,
            sessions=self._streams.total(),
            token_time=self._work.token_time,
            request_time=self._work.request_time,
        )
        return self._plane.load(engine)

    async def watchers(self, request: Empty, context: RpcContext) -> tuple[str, ...]:
        return self._farewell.visitors

    async def drain(self, request: Drain, context: RpcContext) -> None:
        await self._drain(request.patience)

    async def fetch(self, request: FetchRequest, context: RpcContext) -> AsyncGenerator[FetchEvent, None]:
        async with aclosing(self._plane.fetch(request)) as events:
            async for event in events:
                yield event

    async def watch(self, request: Empty, context: RpcContext) -> AsyncGenerator[WatchEvent, None]:
        watch = StoreWatch(self._plane.names, self._activity, self.load, self._plane.telemetry, self._farewell)
        with self._farewell.visit(f"{context.peer.name} {context.peer.epoch}"):
            async with aclosing(watch.events()) as events:
                async for event in events:
                    yield msgspec.structs.replace(event, yours=self._work.of(_caller(context)))

    @contextmanager
    def _stream(self, id: str) -> Iterator[None]:
        """One more of the engine's streams is open."""
        if self._end:
            raise self._ended(id)
        self._streams[id] += 1
        try:
            yield
        except Cancelled:
            if self._end:
                raise self._ended(id) from None
            raise
        finally:
            self._streams[id] -= 1
            if not self._streams[id]:
                del self._streams[id]

    def _ended(self, id: str) -> Cancelled:
        return Cancelled(self._end, where=f"request {id}", fix="use another worker")


def _caller(context: RpcContext) -> str:
    """The process that asks: what it has open on several connections is of one."""
    return f"{context.peer.name} {context.peer.epoch}"
