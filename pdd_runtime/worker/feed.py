"""What one subscriber is fed from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, DeadlineExceeded
from pdd_runtime.plugins.transport import Gone, Ready, Subscription


class SourceFeed:
    """The `Feed` of one subscription. Transport threads (several at once, each block goes to one) take blocks from
    it; the event loop, on which blocks are pinned and released, fills it."""

    def __init__(
        self,
        subscription: Subscription,
        loop: asyncio.AbstractEventLoop,
        unpin: Callable[[int], None],
        closed: Callable[[SourceFeed], None],
    ) -> None:
        """On the loop, `unpin` is called once for each block offered, `closed` once at the end."""
        self.subscription = subscription
        self.where = f"KV of request {subscription.request_id}"
        self._loop, self._unpin, self._closed = loop, unpin, closed
        self._until = now() + subscription.deadline
        self._pins: dict[int, int] = {}
        self._ended = False
        self._changed = threading.Condition()
        # Below: under the condition's lock.
        self._outcomes: list[Ready | Gone | None] = [None] * len(subscription.blocks)
        self._cursor = 0
        self._over = False

    # Called by transport threads.

    def next(self, timeout: float) -> Ready | Gone | None:
        until = min(now() + timeout, self._until)
        with self._changed:
            while True:
                if self._over:
                    raise Cancelled("the feed is closed", where=self.where)
                if self._cursor < len(self._outcomes) and (outcome := self._outcomes[self._cursor]) is not None:
                    self._cursor += 1
                    return outcome
                time = now()
                if time >= self._until:
                    raise DeadlineExceeded(
                        f"the subscription did not end in {self.subscription.deadline:g} s", where=self.where
                    )
                if time >= until:
                    return None
                self._changed.wait(until - time)

    def sent(self, index: int) -> None:
        self._on_loop(lambda: self._drop(index))

    def close(self) -> None:
        self.stop()
        self._on_loop(self._end)

    # Called on the loop.

    @property
    def missing(self) -> list[int]:
        """Indices of the blocks of which nothing is known yet."""
        return [index for index, outcome in enumerate(self._outcomes) if outcome is None]

    def offer(self, index: int, block: int, memory: memoryview) -> None:
        """Block `index` is here, in block number `block`, which the caller has retained for this feed."""
        if self._ended or self._outcomes[index] is not None:
            self._unpin(block)
            return
        self._pins[index] = block
        self._settle(Ready(index, memory.toreadonly()))

    def give_up(self) -> None:
        """What is missing will not come."""
        for index in self.missing:
            self._settle(Gone(index))

    def stop(self) -> None:
        """No more blocks are handed out. Those that a transport is sending stay pinned until it closes the feed."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _settle(self, outcome: Ready | Gone) -> None:
        with self._changed:
            self._outcomes[outcome.index] = outcome
            self._changed.notify_all()

    def _drop(self, index: int) -> None:
        block = self._pins.pop(index, None)
        if block is not None:
            self._unpin(block)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            for index in list(self._pins):
                self._drop(index)
            self._closed(self)

    def _on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed, so the worker has ended, and its blocks with it.
            if not self._loop.is_closed():
                raise
