"""One request at a server that shares memory with its worker, from its blocks to its last event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress

from pdd_runtime.clock import now
from pdd_runtime.errors import CapacityError, EngineError
from pdd_runtime.plugins.engine import BlocksReady, Extended, Stopped, Tokens
from pdd_runtime.server.blocks import Blocks
from pdd_runtime.server.bridge import Bridge
from pdd_runtime.server.connection import Announced, Notice
from pdd_runtime.server.request import Generate, Reason, ServerRequest

log = logging.getLogger(__name__)

PUBLISHING_TIME = 30.0
"""Seconds in which the server's connector must have copied what the server has computed."""
WORD_TIME = 2.0
"""Seconds in which a connector's word about a request arrives that was said before its first token was made."""
AHEAD = 4
"""Blocks that a decode has before they are needed: a server may publish all its output at once, when it ends."""
ROOM_POLL = 0.05
"""Seconds after which a prefill that waits for blocks looks again: others may release some without telling us."""


class Served(ServerRequest):
    """A prefill tells of blocks as they are published."""

    def __init__(
        self,
        id: str,
        blocks: Blocks,
        bridge: Bridge,
        generate: Generate,
        *,
        salt: str = "",
        stop_token_ids: tuple[int, ...] = (),
        sealable: bool = True,
        tails: bool = False,
        kv_wait: float = 30.0,
    ) -> None:
        """`tails`: the connector publishes the end of a sequence when it is told to; without, when the request ends.
        `kv_wait`: seconds that a prefill waits for blocks."""
        super().__init__(id, blocks.tokens, generate, stop_token_ids=stop_token_ids, sealable=sealable)
        self.blocks, self.salt = blocks, salt
        self._bridge, self._tails, self._kv_wait = bridge, tails, kv_wait
        self._held = False
        self._planned: Notice | None = None
        self._loaded: int | None = None
        self._written = blocks.cached
        self._finished: int | None = None
        self._noticed = asyncio.Event()
        self._ready = 0
        self._told = 0
        """Known tokens that the connector was told."""

    def release(self) -> None:
        self.blocks.release()

    async def prefill(self) -> None:
        """Publish the whole prompt, then its first token."""
        blocks, first = self.blocks, None
        await self._make_room()
        if blocks.cached:
            self._say_ready()
        async with self._announced():
            async with aclosing(self.stream()) as tokens:
                async for token in tokens:
                    first = first or token
            if first is None:
                raise self.silent()
            if not await self._heard(lambda: self._written >= self.known, PUBLISHING_TIME):
                raise EngineError(
                    "the server made a token, but its connector did not publish the KV",
                    where=f"request {self.id}",
                    why=f"of {self.known} tokens {self._written} came in {PUBLISHING_TIME:g} s",
                    fix="see the server's log",
                )
        blocks.commit_tail(self.known)
        self._say_ready()
        self.say(Tokens((first,)))
        self.say(Stopped("length", self.known + 1))

    async def decode(self, max_tokens: int, *, hold: bool) -> None:
        """Extend, then at most `max_tokens` tokens; with `hold` until cancelled."""
        if max_tokens == 0 and self.blocks.cached == self.known:
            self.say(Extended(self.known, 0, 0))
            self.say(Stopped("length", self.known))
        else:
            self._open()
            self.blocks.grow(self.known + min(max_tokens, AHEAD * self.blocks.size))
            reason = await self._decode(max_tokens, hold=hold)
            self.say(Stopped(reason, len(self.tokens)))
        if hold:
            await asyncio.Event().wait()

    async def sealing(self) -> None:
        """What is held is read on from: all of it must be here. Of one that is aborted, some engines say nothing."""
        if self._held and self._tails and self.blocks.open:
            self._tell()
            self._bridge.tail(self.transfer, len(self.tokens))
            await self._heard(self._all_published, WORD_TIME)

    async def _decode(self, max_tokens: int, *, hold: bool) -> Reason:
        self._held = hold
        async with self._announced():
            reason = await self.follow(max_tokens)
            if reason != "sealed" or hold:
                # The server has said the last token; its connector has the tail still to copy.
                self._tell()
                patience = WORD_TIME if self._tails and reason == "sealed" else PUBLISHING_TIME
                if self.blocks.open and not await self._heard(self._all_published, patience):
                    log.warning("request %s: the connector did not say how far it has published", self.id)
        self.blocks.commit_tail(max(self._finished or 0, self._written))
        return reason

    def _all_published(self) -> bool:
        """The connector has said that no more comes, or that all is there: the last token's KV was never computed."""
        return self._finished is not None or self._written >= len(self.tokens) - 1

    async def extended(self) -> Extended:
        """What the server found and what it computed; where neither it nor its connector says so, it found nothing."""
        if self.found is not None:
            found = min(self.found, self.known)
            return Extended(found, self.known - found, 1)
        await self._heard(lambda: self._planned is not None, WORD_TIME)
        if self._planned is None:
            return Extended(0, self.known, 1)
        loaded = self._planned.tokens
        if loaded:
            await self._heard(lambda: self._loaded is not None, WORD_TIME)
            loaded = min(loaded, self._loaded or 0)
        cached = min(self._planned.local + loaded, self.known)
        return Extended(cached, self.known - cached, 1)

    async def _make_room(self) -> None:
        if self.blocks.cached == self.known:
            self.blocks.offer_only()
            return
        until = now() + self._kv_wait
        while not self.blocks.open:
            try:
                self.blocks.open_for(self.known)
            except CapacityError as error:
                if now() >= until:
                    raise CapacityError(
                        f"there was no room for the prompt's KV in {self._kv_wait:g} s",
                        where=f"request {self.id}",
                        why=f"{error.what}; {error.why}",
                        fix="give the pool more kv_memory or replicas; kv_wait says how long a prefill waits",
                    ) from None
                await asyncio.sleep(ROOM_POLL)

    def _open(self) -> None:
        """A decode does not wait for blocks to publish into: its tokens are what is asked for."""
        try:
            self.blocks.open_for(self.known + 1)
        except CapacityError:
            self.blocks.offer_only()

    def _announced(self) -> AbstractAsyncContextManager[None]:
        blocks = self.blocks
        self._told = self.known
        offered = min(blocks.cached, self.known - 1)
        tokens, numbers = tuple(blocks.tokens), tuple(blocks.numbers)
        announced = Announced(self.transfer, tokens, offered, blocks.first, numbers, self.salt)
        return self._bridge.announce(announced, self._notice)

    def grew(self) -> None:
        """Blocks ahead of the server, which is some steps ahead of what is known here."""
        length, size = len(self.tokens), self.blocks.size
        if length + AHEAD // 2 * size > self.blocks.published and (added := self.blocks.grow(length + AHEAD * size)):
            self._tell(added)

    def _tell(self, added: tuple[int, ...] = ()) -> None:
        ids = tuple(self.tokens[self._told :])
        self._told += len(ids)
        self._bridge.add(self.transfer, added, ids)

    def _notice(self, notice: Notice) -> None:
        match notice.kind:
            case "planned":
                self._planned = notice
            case "loaded":
                self._loaded = notice.tokens
            case "written":
                self._written = max(self._written, notice.tokens)
                self.blocks.commit(self._written)
                self._say_ready()
            case "finished":
                self._finished = notice.tokens
        self._noticed.set()

    def _say_ready(self) -> None:
        """Of a prompt, as far as its blocks are committed."""
        if self.sealable:
            return
        ready = self.blocks.committed
        if ready > self._ready:
            self._ready = ready
            self.say(BlocksReady(ready, self.blocks.cached))

    async def _heard(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the connector says so within the time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._noticed.clear()
                    await self._noticed.wait()
        return condition()
