"""One request at a server that moves KV itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import BlocksReady, Extended, Offer, Received, Stopped, Tokens
from pdd_runtime.server.request import Generate, Running, ServerRequest

GRACE = 1.0
"""Seconds that a server may be late with its own word on a transfer: it says more."""


class NativeRequest(ServerRequest):
    """An ordinary one: the server finds what it has and computes the rest."""

    def __init__(
        self,
        id: str,
        tokens: Sequence[int],
        generate: Generate,
        *,
        cached: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        sealable: bool = True,
    ) -> None:
        """`cached`: known tokens that the server has, as far as is known here; what it says itself goes before."""
        super().__init__(id, list(tokens), generate, stop_token_ids=stop_token_ids, sealable=sealable)
        self._cached = cached

    async def prefill(self) -> None:
        first = None
        async with aclosing(self.stream()) as tokens:
            async for token in tokens:
                first = first or token
        if first is None:
            raise self.silent()
        self.say(BlocksReady(self.known, self._was_here))
        self.say(Tokens((first,)))
        self.say(Stopped("length", self.known + 1))

    async def decode(self, max_tokens: int, *, hold: bool) -> None:
        reason = await self.follow(max_tokens)
        self.say(Stopped(reason, len(self.tokens)))
        if hold:
            await asyncio.Event().wait()

    async def extended(self) -> Extended:
        cached = self._was_here
        return Extended(cached, self.known - cached, 1)

    @property
    def _was_here(self) -> int:
        """At least one token is computed: the next one's logits come of it."""
        found = self._cached if self.found is None else self.found
        return max(0, min(found, self.known - (self.found is None)))


class Passed(Running):
    """One end of a transfer: what the plane says of it is passed on."""

    def __init__(
        self,
        id: str,
        begin: Callable[[str], AsyncGenerator[Offer | Received, None]],
        seconds: float,
        *,
        stays: bool = False,
    ) -> None:
        """`seconds`: for the reader to have all, whatever the server thinks of it. `stays`: what was read is kept until
        the request is cancelled, also where what was begun ends before."""
        super().__init__(id)
        self._begin, self._seconds, self._stays = begin, seconds, stays

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self._seconds + GRACE) as limit, aclosing(self._begin(self.transfer)) as events:
                async for event in events:
                    if self._stays:
                        limit.reschedule(None)
                    self.say(event)
        except TimeoutError:
            raise EngineError(
                "the KV has not reached its reader in time",
                where=f"request {self.id}",
                why=f"it had {self._seconds:g} s, and neither end said anything",
                fix="the servers' logs have more: `pdd-runtime logs`",
            ) from None
        if self._stays:
            await asyncio.Event().wait()
        self.say(Stopped("length", 0))
