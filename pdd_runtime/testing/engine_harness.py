"""An engine outside a worker: what the engine suite, and an author at work, drive it with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import BlockStore, CachedNames, KvLayout
from pdd_runtime.plugins.engine import (
    BlocksReady,
    DecodeEvent,
    DecodeRequest,
    Engine,
    EngineInfo,
    Extended,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Stopped,
    Token,
    Tokens,
)

GREEDY = Sampling(temperature=0)
PATIENCE = 30.0
"""Seconds after which a request counts as hung."""


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
    """A started engine with its store, and its verbs run to their end."""

    def __init__(self, engine: Engine, store: BlockStore, info: EngineInfo) -> None:
        self.engine, self.store, self.info = engine, store, info
        self._requests = 0

    @staticmethod
    @asynccontextmanager
    async def started(engine: Engine) -> AsyncGenerator[EngineHarness, None]:
        """Start `engine`, close it at the end."""
        host = StoreHost()
        try:
            info = await engine.start(host)
            assert host.store is not None, "the engine opened no store"
            yield EngineHarness(engine, host.store, info)
        finally:
            await engine.close()

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
    ) -> AsyncGenerator[DecodeEvent, None]:
        request = DecodeRequest(
            id=request_id or self.new_id(),
            tokens=tuple(tokens),
            prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            salt=salt,
            hold=hold,
        )
        return self.engine.decode(request)

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
        await self.until(lambda: self.store.stats.used == 0, "blocks are still referenced")
        load = await self.engine.load()
        assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)

    @staticmethod
    async def until(true: Callable[[], bool], otherwise: str) -> None:
        """Wait for a condition that an engine's own loop brings about."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not true():  # noqa: ASYNC110 - an engine has no event to wait for
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"after {PATIENCE} s {otherwise}") from None
