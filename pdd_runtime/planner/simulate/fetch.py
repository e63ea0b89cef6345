"""How a prompt's KV comes from prefill to a worker that decodes."""

from __future__ import annotations

from collections.abc import Callable

from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.pool import Worker
from pdd_runtime.planner.simulate.ways import Transfer, Way


class Fetch:
    """The receiver has subscribed to what it lacks; it is sent as prefill makes it, in whole blocks."""

    __slots__ = (
        "_block", "_constant", "_events", "_sent", "_subscribed", "_token", "_transfer", "hit", "size", "target",
    )  # fmt: skip

    def __init__(
        self,
        events: Events,
        source: Worker,
        target: Worker,
        way: tuple[Way, float],
        prompt: int,
        hit: int,
        arrived: Callable[[], None],
    ) -> None:
        """`hit`: leading tokens of the `prompt` that are there. `arrived` is called when the rest is, too."""
        line, delay = way
        pool = source.pool
        self.target, self.hit, self._events, self._token = target, hit, events, pool.kv_token
        self._block, self._constant = pool.block, pool.kv_constant
        self._sent = hit - hit % pool.block
        # The frontend asks the receiver, and the receiver the sender.
        self._subscribed = events.now + target.pool.delay + delay
        lacks = hit < prompt
        self.size = self._constant + self._token * (self._blocks(prompt) - self._sent) if lacks else 0.0
        """Bytes in all."""
        self._transfer: Transfer | None = None
        if self.size:
            self._transfer = line.open(self.size, arrived)
        else:
            events.push(events.now + target.pool.delay, arrived)

    def upto(self, position: int) -> None:
        """Prefill has so many leading tokens."""
        whole = position - position % self._block
        if whole > self._sent and self.size:
            self._send(self._token * (whole - self._sent))
            self._sent = whole

    def whole(self, prompt: int) -> None:
        """Prefill has all of it."""
        if self.size:
            self._send(self._token * (self._blocks(prompt) - self._sent) + self._constant)

    def cancel(self) -> None:
        """It is not wanted any more."""
        if self._transfer is not None:
            self._transfer.cancel()

    def let_go(self) -> None:
        """Who asked needs it no more, and is not known to it any more."""
        self._transfer = None

    def _blocks(self, tokens: int) -> int:
        """Tokens of the blocks in which so many lie."""
        return tokens + -tokens % self._block

    def _send(self, nbytes: float) -> None:
        assert self._transfer is not None
        if self._events.now < self._subscribed:
            self._events.push(self._subscribed, self._transfer.add, nbytes)
        else:
            self._transfer.add(nbytes)
