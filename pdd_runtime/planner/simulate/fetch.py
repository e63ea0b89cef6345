"""How a prompt's KV comes from prefill to a worker that decodes."""

from __future__ import annotations

from collections.abc import Callable

from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.pool import Worker
from pdd_runtime.planner.simulate.ways import Transfer, Way


class Fetch:
    """The receiver has subscribed to what it lacks; it is sent as prefill makes it."""

    __slots__ = ("_constant", "_events", "_position", "_subscribed", "_token", "_transfer", "hit", "size", "target")

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
        model = source.pool.model
        self.target, self.hit, self._events, self._token = target, hit, events, model.kv_token
        self._constant = model.kv_constant
        self._position = hit
        # The frontend asks the receiver, and the receiver the sender.
        self._subscribed = events.now + target.pool.delay + delay
        lacking = prompt - hit
        self.size = model.kv_bytes(lacking) if lacking > 0 else 0.0
        """Bytes in all."""
        self._transfer: Transfer | None = None
        if self.size:
            self._transfer = line.open(self.size, arrived)
        else:
            events.push(events.now + target.pool.delay, arrived)

    def upto(self, position: int) -> None:
        """Prefill has so many leading tokens."""
        if position > self._position and self.size:
            self._send(self._token * (position - self._position))
            self._position = position

    def whole(self, prompt: int) -> None:
        """Prefill has all of it."""
        if self.size:
            self._send(self._token * (prompt - self._position) + self._constant)

    def cancel(self) -> None:
        """It is not wanted any more."""
        if self._transfer is not None:
            self._transfer.cancel()

    def _send(self, nbytes: float) -> None:
        assert self._transfer is not None
        if self._events.now < self._subscribed:
            self._events.push(self._subscribed, self._transfer.add, nbytes)
        else:
            self._transfer.add(nbytes)
