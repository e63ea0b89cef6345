"""One request on its way through the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Literal

from pdd_runtime.errors import PddError
from pdd_runtime.inprocess.block_table import BlockTable
from pdd_runtime.inprocess.sampler import Sampler
from pdd_runtime.plugins.engine import BlocksReady, Extended, Stopped, Token, Tokens

Event = BlocksReady | Extended | Tokens | Stopped


class Sequence:
    """Tokens, their blocks, and the events that tell the caller about both. On the event loop only."""

    def __init__(
        self,
        request_id: str,
        tokens: tuple[int, ...],
        end: int,
        sampler: Sampler,
        table: BlockTable,
        *,
        announces: bool = False,
        hold: bool = False,
    ) -> None:
        """`end`: stop when so many tokens are there. `announces`: tell of blocks as they are published. `hold`: keep
        them referenced after the stop."""
        self.id, self.sampler, self.table = request_id, sampler, table
        self.announces, self.hold = announces, hold
        self.tokens = list(tokens)
        self.known = len(tokens)
        """Tokens that came with the request."""
        self.end = end
        self.number = 0
        """The engine's own name for it, given by the scheduler."""
        self.since = 0.0
        """When the scheduler was given it."""
        self.over = False
        """Nothing more is to be computed."""
        self.in_step = False
        """A forward pass is writing into the blocks: they must not be given back now."""
        self.freed = asyncio.Event()
        """All blocks are given back, for good."""
        self._sealed: int | None = None
        self._cached: int | None = None
        self._computed = self._passes = 0
        self._announced = 0
        self._settled = False
        self._events: deque[Event | PddError] = deque()
        self._arrived = asyncio.Event()

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.table.computed

    @property
    def samples(self) -> bool:
        """Whether a token is wanted behind those that are there."""
        return not self.over and len(self.tokens) < self._stop_at

    @property
    def _stop_at(self) -> int:
        return self.end if self._sealed is None else min(self.end, max(self._sealed, self.known))

    def begin(self) -> None:
        """Begin, or begin again after its blocks were taken away, with what is cached."""
        self.table.attach(self.tokens, len(self.tokens) - self.samples)
        if self._cached is None:
            self._cached = self.table.computed
        self._announce(self.table.full_tokens)
        if self.pending == 0:
            self._settle(None)

    def advance(self, computed: int, token: Token | None) -> None:
        """A pass has made the KV of the first `computed` tokens and, behind the last, `token`."""
        self._computed += computed - self.table.computed
        self._passes += 1
        self.table.advance(self.tokens, computed)
        self._announce(self.table.full_tokens)
        if self.pending == 0:
            self._settle(token)

    def seal(self, tokens: int) -> None:
        """Stop at this length, or at once if it is past, but not before the known tokens are extended.
        A later seal can only come closer: what has once been planned without a sample gets none."""
        self._sealed = tokens if self._sealed is None else min(self._sealed, tokens)
        if self._settled and not self.in_step and not self.over and not self.samples:
            self._publish_tail()
            self._stop("sealed")

    def fail(self, error: PddError) -> None:
        """End with an error, in any state; the events before it can still be read."""
        self.over = True
        self._emit(error)

    def free(self) -> None:
        self.over = True
        self.table.release()
        self.freed.set()

    async def next(self) -> Event:
        """The next event; tokens that are there already come as one. Raises the error that ended the request."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, PddError):
            raise event
        if isinstance(event, Tokens):
            tokens = event.tokens
            while self._events and isinstance(following := self._events[0], Tokens):
                tokens += following.tokens
                self._events.popleft()
            return Tokens(tokens)
        return event

    def _settle(self, token: Token | None) -> None:
        """The KV of all tokens is there: tell it, take the new one, and stop if it was the last."""
        if not self._settled:
            self._settled = True
            self._emit(Extended(self._cached or 0, self._computed, self._passes))
        fresh = token if self.samples else None
        if fresh is not None:
            self.tokens.append(fresh.id)
        reason: Literal["length", "stop", "sealed"] | None = None
        if fresh is not None and fresh.id in self.sampler.sampling.stop_token_ids:
            reason = "stop"
        elif not self.samples:
            reason = "length" if len(self.tokens) >= self.end else "sealed"
        if reason is not None:
            self._publish_tail()
        if fresh is not None:
            self._emit(Tokens((fresh,)))
        if reason is not None:
            self._stop(reason)

    def _stop(self, reason: Literal["length", "stop", "sealed"]) -> None:
        self.over = True
        self._emit(Stopped(reason, len(self.tokens)))

    def _publish_tail(self) -> None:
        self.table.publish_tail(self.tokens)
        self._announce(self.table.computed)

    def _announce(self, tokens: int) -> None:
        if self.announces and tokens > self._announced:
            self._announced = tokens
            self._emit(BlocksReady(tokens, self._cached or 0))

    def _emit(self, event: Event | PddError) -> None:
        self._events.append(event)
        self._arrived.set()
