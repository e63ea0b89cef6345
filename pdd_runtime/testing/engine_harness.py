"""An engine outside a worker: what the engine suite, and an author at work, drive it with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.kv import BlockStore, CachedNames, KvLayout
from pdd_runtime.plugins.engine import (
    BlocksReady,
    DecodeEvent,
    DecodeRequest,
    Engine,
    EngineInfo,
    Extended,
    Load,
    Offer,
    OfferRequest,
    PrefillEvent,
    PrefillRequest,
    Received,
    ReceiveRequest,
    Sampling,
    Stopped,
    Token,
    Tokens,
)

GREEDY = Sampling(temperature=0)
PATIENCE = 100.0
"""Seconds after which a request counts as hung. A slow and busy machine has them; who is done earlier costs nothing."""


class StoreHost:
    """The `EngineHost` of a test: keeps the store, or the names, and the failure it is told of."""

    def __init__(self) -> None:
        self.store: BlockStore | None = None
        self.names: CachedNames | None = None
        self.failure: EngineError | None = None

    def open_store(self, layout: KvLayout, blocks: int, *, shared: bool = False) -> BlockStore:
        self.store = BlockStore(layout, blocks, shared=shared)
        return self.store

    def open_names(self, layout: KvLayout) -> CachedNames:
        self.names = CachedNames(layout)
        return self.names

    def failed(self, error: EngineError) -> None:
        self.failure = error


class Prefilled(NamedTuple):
    ready: tuple[BlocksReady, ...]
    first: Token


class Decoded(NamedTuple):
    extended: Extended
    tokens: tuple[Token, ...]
    stopped: Stopped

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class EngineHarness:
    """A started engine with its store, or its names, and its verbs run to their end."""

    def __init__(self, engine: Engine, host: StoreHost, info: EngineInfo) -> None:
        self.engine, self.info = engine, info
        self._host = host
        self._requests = 0

    @staticmethod
    @asynccontextmanager
    async def started(engine: Engine, role: Role = "aggregated") -> AsyncGenerator[EngineHarness, None]:
        """Start `engine` as one of a pool of that role, close it at the end."""
        host = StoreHost()
        engine.role = role
        try:
            info = await engine.start(host)
            opened = "portable" if host.store is not None else "native" if host.names is not None else "nothing"
            assert opened == info.capabilities.kv, f"the engine opened {opened}"
            yield EngineHarness(engine, host, info)
        finally:
            await engine.close()

    @property
    def store(self) -> BlockStore:
        """Of an engine with portable KV."""
        assert self._host.store is not None, "an engine with native KV has no store"
        return self._host.store

    @property
    def names(self) -> CachedNames:
        """Of an engine with native KV."""
        assert self._host.names is not None, "an engine with portable KV has a store"
        return self._host.names

    @property
    def failure(self) -> EngineError | None:
        """What the engine has told its host, where it can serve nothing more."""
        return self._host.failure

    def new_id(self) -> str:
        self._requests += 1
        return f"test-{self._requests}"

    def prefilling(
        self, tokens: Sequence[int], sampling: Sampling = GREEDY, *, salt: str = "", request_id: str | None = None
    ) -> AsyncGenerator[PrefillEvent, None]:
        request = PrefillRequest(id=request_id or self.new_id(), tokens=tuple(tokens), sampling=sampling, salt=salt)
        return self.engine.prefill(request)

    def decoding(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        prompt_tokens: int | None = None,
        salt: str = "",
        hold: bool = False,
        request_id: str | None = None,
        offer: Offer | None = None,
    ) -> AsyncGenerator[DecodeEvent, None]:
        request = DecodeRequest(
            id=request_id or self.new_id(),
            tokens=tuple(tokens),
            prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            salt=salt,
            hold=hold,
            offer=offer,
        )
        return self.engine.decode(request)

    def offering(
        self,
        tokens: Sequence[int],
        *,
        salt: str = "",
        request_id: str | None = None,
        timeout: float = PATIENCE,
    ) -> AsyncGenerator[Offer, None]:
        request = OfferRequest(
            id=request_id or self.new_id(),
            tokens=tuple(tokens),
            sampling=GREEDY,
            salt=salt,
            reader="main",
            timeout=timeout,
        )
        return self.engine.offer(request)

    def receiving(
        self,
        tokens: Sequence[int],
        offer: Offer,
        *,
        salt: str = "",
        request_id: str | None = None,
        timeout: float = PATIENCE,
    ) -> AsyncGenerator[Received, None]:
        request = ReceiveRequest(
            id=request_id or self.new_id(),
            tokens=tuple(tokens),
            sampling=GREEDY,
            salt=salt,
            offer=offer,
            timeout=timeout,
        )
        return self.engine.receive(request)

    async def prefill(self, tokens: Sequence[int], sampling: Sampling = GREEDY, *, salt: str = "") -> Prefilled:
        ready: list[BlocksReady] = []
        first: list[Token] = []
        async with asyncio.timeout(PATIENCE), aclosing(self.prefilling(tokens, sampling, salt=salt)) as events:
            async for event in events:
                if isinstance(event, BlocksReady):
                    assert not first, "blocks after the first token"
                    ready.append(event)
                else:
                    first.extend(event.tokens)
        assert len(first) == 1, f"a prefill makes one token, not {len(first)}"
        return Prefilled(tuple(ready), first[0])

    async def decode(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        prompt_tokens: int | None = None,
        salt: str = "",
    ) -> Decoded:
        events = self.decoding(tokens, max_tokens, sampling, prompt_tokens=prompt_tokens, salt=salt)
        async with asyncio.timeout(PATIENCE), aclosing(events):
            return await self.collect(events)

    @staticmethod
    async def collect(events: AsyncGenerator[DecodeEvent, None]) -> Decoded:
        """Read a decode up to its `Stopped`, and check the order of events and positions."""
        extended: Extended | None = None
        tokens: list[Token] = []
        async for event in events:
            match event:
                case Extended():
                    assert extended is None, "extended twice"
                    extended = event
                case Tokens():
                    assert extended is not None, "tokens before the known ones were extended"
                    assert event.tokens, "an event without tokens"
                    tokens.extend(event.tokens)
                case Stopped():
                    assert extended is not None, "stopped before the known tokens were extended"
                    first = tokens[0].position if tokens else event.tokens
                    assert [token.position for token in tokens] == list(range(first, event.tokens))
                    return Decoded(extended, tuple(tokens), event)
        raise AssertionError("the stream ended without Stopped")

    async def generate(
        self, tokens: Sequence[int], n: int, sampling: Sampling = GREEDY, *, salt: str = ""
    ) -> tuple[int, ...]:
        """The `n` ids that follow `tokens`."""
        return (await self.decode(tokens, n, sampling, salt=salt)).ids

    async def idle(self) -> None:
        """Return when nothing is referenced and nothing runs; fail when that takes long."""
        if self._host.store is not None:
            await self.until(lambda: self.store.stats.used == 0, "blocks are still referenced")
            load = await self.engine.load()
            assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)
            return

        async def busy() -> Load | None:
            load = await self.engine.load()
            return load if load.running or load.waiting or load.blocks_used or load.sessions else None

        await self.eventually(busy, "the engine is busy")

    @staticmethod
    async def eventually(trouble: Callable[[], Awaitable[object]], what: str) -> None:
        """Wait until there is no `trouble` any more."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while (found := await trouble()) is not None:
            assert loop.time() < until, f"after {PATIENCE} s {what}: {found}"
            await asyncio.sleep(0.02)

    @staticmethod
    async def until(true: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition that an engine's own loop brings about."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not true():  # noqa: ASYNC110 - an engine has no event to wait for
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"after {PATIENCE} s {otherwise}") from None
