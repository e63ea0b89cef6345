"""One request at a server, whatever its data plane: what it streams becomes events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Literal, NamedTuple

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.ids import new_id
from pdd_runtime.plugins.engine import BlocksReady, Extended, Offer, Received, Stopped, Token, Tokens

Event = BlocksReady | Extended | Tokens | Stopped | Offer | Received
Reason = Literal["length", "stop", "sealed"]


class Found(NamedTuple):
    """So many of the known tokens the server had not to compute: where it says so itself, before its first token."""

    tokens: int


Piece = tuple[Token, ...] | Found
Generate = Callable[[str], AsyncGenerator[Piece, None]]
"""Id of the request at the server → new tokens as the server streams them, in order of position; its close aborts."""


class Running:
    """Its events come from `next`, while a task of the engine's says them."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.transfer = new_id("kv")
        """Its name at the server: two requests may have one id."""
        self._events: asyncio.Queue[Event | PddError] = asyncio.Queue()

    async def next(self) -> Event:
        """The next event. Raises why the request failed."""
        event = await self._events.get()
        if isinstance(event, PddError):
            self._events.put_nowait(event)
            raise event
        return event

    def say(self, event: Event) -> None:
        self._events.put_nowait(event)

    def fail(self, error: PddError) -> None:
        """`next` raises it, behind what it has to give before."""
        self._events.put_nowait(error)

    def seal(self, tokens: int) -> None:
        """Stop a decode when its sequence has so many."""

    def release(self) -> None:
        """Give back all that it holds. Idempotent."""


class ServerRequest(Running, ABC):
    """Tokens asked of the server. A subclass is a data plane's."""

    def __init__(
        self,
        id: str,
        tokens: list[int],
        generate: Generate,
        *,
        stop_token_ids: tuple[int, ...] = (),
        sealable: bool = True,
    ) -> None:
        super().__init__(id)
        self.tokens, self.sealable = tokens, sealable
        """`tokens`: all that are known, more as they come."""
        self.known = len(tokens)
        """Tokens that were known at the beginning."""
        self.found: int | None = None
        """What the server has said that it had of them."""
        self._generate, self._stops = generate, frozenset(stop_token_ids)
        self._seal_at: int | None = None
        self._sealed = asyncio.Event()

    def seal(self, tokens: int) -> None:
        if not self.sealable:
            return  # a prefill makes its one token in any case
        self._seal_at = tokens
        if len(self.tokens) >= tokens:
            self._sealed.set()

    @abstractmethod
    async def prefill(self) -> None:
        """`BlocksReady`, `Tokens` with the first token, `Stopped`."""

    @abstractmethod
    async def decode(self, max_tokens: int, *, hold: bool) -> None:
        """`Extended`, at most `max_tokens` tokens, `Stopped`; with `hold` until cancelled."""

    @abstractmethod
    async def extended(self) -> Extended:
        """How the known tokens' KV came to be there. Called once, with the first token at hand."""

    def grew(self) -> None:
        """A token more is known."""

    async def sealing(self) -> None:
        """It is sealed, and will be aborted at the server when this returns."""

    async def follow(self, max_tokens: int) -> Reason:
        """Say what comes until there is enough. Where `max_tokens` is 0, the one token that is made is dropped."""
        extended = False
        async with aclosing(self.stream()) as tokens:
            async for token in tokens:
                if not extended:
                    self.say(await self.extended())
                    extended = True
                if max_tokens == 0:
                    continue
                self.tokens.append(token.id)
                self.say(Tokens((token,)))
                self.grew()
                if token.id in self._stops:
                    return "stop"
                if self._seal_at is not None and len(self.tokens) >= self._seal_at:
                    await self.sealing()
                    return "sealed"
        if self._sealed.is_set():
            return "sealed"
        if not extended:
            raise self.silent()
        return "length"

    async def stream(self) -> AsyncGenerator[Token, None]:
        """Of the server, to its end or until the request is sealed."""
        sealed = asyncio.ensure_future(self._sealed.wait())
        async with aclosing(self._generate(self.transfer)) as pieces:
            try:
                while True:
                    step = asyncio.ensure_future(anext(pieces, None))
                    try:
                        await asyncio.wait({step, sealed}, return_when=asyncio.FIRST_COMPLETED)
                        if not step.done():
                            await self.sealing()
                            return
                    finally:
                        if not step.done():
                            step.cancel()
                            await asyncio.wait({step})
                    piece = step.result()
                    if piece is None:
                        return
                    if isinstance(piece, Found):
                        self.found = piece.tokens
                        continue
                    for token in piece:
                        yield token
            finally:
                sealed.cancel()

    def silent(self) -> EngineError:
        return EngineError("the server made no token", where=f"request {self.id}")
