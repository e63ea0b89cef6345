"""What a worker serves on the message plane."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import (
    DecodeEvent,
    DecodeRequest,
    Engine,
    Extended,
    Load,
    PrefillEvent,
    PrefillRequest,
    Stopped,
    TokenizerFiles,
    Tokens,
)
from pdd_runtime.plugins.messages import Cached, Empty, FetchEvent, FetchRequest, RequestId, Seal, WatchEvent
from pdd_runtime.rpc import RpcContext, RpcServer
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.agent import Agent
from pdd_runtime.worker.transports import Transports
from pdd_runtime.worker.watch import StoreWatch

log = logging.getLogger(__name__)


class Service:
    """The handlers. They live as long as their caller's stream: when that is closed, or its connection lost, what
    they hold in engine and agent is freed."""

    def __init__(
        self,
        engine: Engine,
        store: BlockStore,
        agent: Agent,
        transports: Transports,
        activity: Activity,
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine, self._store, self._agent, self._transports = engine, store, agent, transports
        self._activity, self._drain = activity, drain
        self._streams = 0

    def register(self, server: RpcServer) -> None:
        server.stream("engine.prefill", PrefillRequest, self.prefill)
        server.stream("engine.decode", DecodeRequest, self.decode)
        server.unary("engine.seal", Seal, self.seal)
        server.unary("engine.cancel", RequestId, self.cancel)
        server.unary("engine.cached", Cached, self.cached)
        server.unary("engine.tokenizer", Empty, self.tokenizer)
        server.unary("engine.load", Empty, lambda params, context: self.load())
        server.stream("kv.fetch", FetchRequest, self.fetch)
        server.stream("worker.watch", Empty, self.watch)
        server.unary("worker.drain", Empty, lambda params, context: self._drain())

    async def prefill(self, request: PrefillRequest, context: RpcContext) -> AsyncGenerator[PrefillEvent, None]:
        begun = now()
        with self._activity.publishing(request.id):
            self._streams += 1
            try:
                async with aclosing(self._engine.prefill(request)) as events:
                    async for event in events:
                        if isinstance(event, Tokens):
                            tokens = len(request.tokens)
                            log.info("request %s: prefilled %d tokens in %.3f s", request.id, tokens, now() - begun)
                        yield event
            finally:
                self._streams -= 1

    async def decode(self, request: DecodeRequest, context: RpcContext) -> AsyncGenerator[DecodeEvent, None]:
        begun, extended, took = now(), Extended(0, 0, 0), 0.0
        with self._activity.publishing(request.id) as published:
            self._streams += 1
            try:
                async with aclosing(self._engine.decode(request)) as events:
                    async for event in events:
                        if isinstance(event, Extended):
                            extended, took = event, now() - begun
                        elif isinstance(event, Stopped):
                            # Held or not: no block comes after this.
                            published()
                            log.info(
                                "request %s: made %d tokens, %s; before that extended %d tokens behind %d in %.3f s",
                                *(request.id, event.tokens - len(request.tokens), event.reason),
                                *(extended.computed, extended.cached, took),
                            )
                        yield event
            finally:
                self._streams -= 1

    async def seal(self, request: Seal, context: RpcContext) -> None:
        await self._engine.seal(request.id, request.tokens)

    async def cancel(self, request: RequestId, context: RpcContext) -> None:
        await self._engine.cancel(request.id)

    async def cached(self, request: Cached, context: RpcContext) -> int:
        return await self._engine.cached(request.tokens, request.salt)

    async def tokenizer(self, request: Empty, context: RpcContext) -> TokenizerFiles:
        return await self._engine.tokenizer()

    async def load(self) -> Load:
        stats = self._store.stats
        return msgspec.structs.replace(
            await self._engine.load(),
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=self._streams + self._agent.sessions,
        )

    async def fetch(self, request: FetchRequest, context: RpcContext) -> AsyncGenerator[FetchEvent, None]:
        transport = self._transports.fetching(request.transport, request.source)
        async with aclosing(self._agent.fetch(request, transport)) as events:
            async for event in events:
                yield event

    async def watch(self, request: Empty, context: RpcContext) -> AsyncGenerator[WatchEvent, None]:
        watch = StoreWatch(self._store, self._activity, self.load, self._transports.telemetry)
        async with aclosing(watch.events()) as events:
            async for event in events:
                yield event
