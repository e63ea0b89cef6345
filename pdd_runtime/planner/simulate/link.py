"""A link between clusters: how those who send over it share it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from pdd_runtime.planner.simulate.events import Events, Handle
from pdd_runtime.planner.simulate.sharing import Fair, Ordered, Sharing

SHORTEST: Final = 0.1
LONGEST: Final = 0.5
"""Seconds of one sample of goodput."""
MEMORY: Final = 2.0
"""Seconds after which a sample counts for 1/e."""
DUST: Final = 1e-3
"""Bytes: fewer than these are rounding errors."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """One direction of a link."""

    bandwidth: float
    """Bytes/s of the line."""
    rtt: float
    """Seconds there and back."""
    flow_rate: float | None = None
    """Bytes/s that one connection reaches at most, as TCP on a long way; None: the line's."""
    streams: int = 1
    """Connections that one transfer uses."""
    connections: int | None = None
    """Connections there are: a transfer that finds none waits. None: as many as are wanted."""
    discipline: Literal["shortest", "fair", "fifo"] = "shortest"
    """Who sends: who has the fewest bytes left; all at equal rates, as TCP has it; who came first."""
    small: float = float(2 << 20)
    """Of `shortest`: transfers of at most so many bytes go before all others."""
    ageing: float = 0.1
    """Of `shortest`: the share of the line that is the oldest transfer's."""

    def __post_init__(self) -> None:
        if self.bandwidth <= 0 or self.rtt < 0 or (self.flow_rate is not None and self.flow_rate <= 0):
            raise ValueError(f"no such link: {self.bandwidth} bytes/s, {self.flow_rate} a connection, rtt {self.rtt} s")
        if self.streams < 1 or (self.connections is not None and self.connections < self.streams):
            raise ValueError(f"no such link: {self.streams} connections a transfer, of {self.connections}")

    @property
    def transfer_rate(self) -> float:
        """Bytes/s that one transfer reaches at most."""
        return math.inf if self.flow_rate is None else self.flow_rate * self.streams

    @property
    def places(self) -> float:
        """Transfers that can send at once."""
        return math.inf if self.connections is None else self.connections // self.streams


class Transfer:
    """Some bytes on their way: `size` in all, which can be sent as they are added. `SimLink.open` makes them."""

    __slots__ = (
        "active", "aged", "at", "done", "key", "link", "made", "number", "over", "place", "rate", "sent", "size",
        "timer",
    )  # fmt: skip

    def __init__(self, link: SimLink, number: int, size: float, done: Callable[[], object]) -> None:
        self.link, self.number, self.size, self.done = link, number, size, done
        self.made = 0.0
        """Bytes that could be sent so far."""
        self.sent = 0.0
        """Bytes that were sent by `at`."""
        self.at = 0.0
        self.rate = 0.0
        self.active = False
        """It has something to send."""
        self.place = False
        """It holds connections."""
        self.over = False
        self.timer: Handle | None = None
        # The sharing's own.
        self.aged = False
        self.key: tuple[bool, float, int] | float | None = None

    def add(self, nbytes: float) -> None:
        """So many bytes more can be sent; none beyond `size`."""
        link, made = self.link, self.made + nbytes
        if made > self.size - DUST:
            made = self.size
        if self.over or made <= self.made:
            return
        link.flow()
        link.made += made - self.made
        self.made = made
        if self.active:
            link.sharing.more(self)
        else:
            self.active = True
            link.sharing.begin(self)

    def cancel(self) -> None:
        """No more of it is sent, and `done` is not called. Idempotent."""
        if self.over:
            return
        self.over = True
        link = self.link
        link.flow()
        was_active, self.active = self.active, False
        if was_active:
            link.sharing.end(self)
        link.made -= self.made - self.sent
        link.sharing.leave(self)
        link.flow()


class SimLink:
    """One direction of a link. Bytes flow as a fluid: between two events each transfer has a rate, which is what its
    connections carry at most.

    `shortest`: as `pdd_tcp.scheduler` has it. Who has the fewest bytes left sends as fast as it can, then the next, as
    long as the line has room; those of at most `small` bytes in all come first. The oldest has `ageing` of the line at
    least. `fifo`: who came first sends as fast as it can, then the next. `fair`: all that have something to send share
    the line equally.

    Under `fair` and `fifo` a transfer that has begun keeps its connections to its end; under `shortest` all use the
    same ones.
    """

    __slots__ = (
        "_at", "_busy", "_goodput", "_marked", "_number", "_sent", "_since", "arrived", "bandwidth", "events", "made",
        "model", "rate", "sharing", "using",
    )  # fmt: skip

    def __init__(self, events: Events, model: LinkModel) -> None:
        self.events, self.model, self.bandwidth = events, model, model.bandwidth
        self.arrived = 0
        """Transfers that have arrived whole."""
        self.using = 0
        """Transfers that hold connections."""
        self.rate = 0.0
        """Bytes/s now."""
        self.made = 0.0
        """Bytes that could be sent so far, less those that were cancelled."""
        self.sharing: Sharing = Fair(self) if model.discipline == "fair" else Ordered(self)
        self._number = 0
        self._at = self._sent = self._busy = 0.0
        self._goodput: float | None = None
        self._since: float | None = None
        """When the sample began; None: there was nothing to send."""
        self._marked = 0.0
        """Bytes that were sent before."""

    def open(self, size: float, done: Callable[[], object]) -> Transfer:
        """A transfer of `size` bytes in all, of which nothing is there yet. `done` is called when all have arrived:
        half a round trip after the last has left."""
        self._number += 1
        transfer = Transfer(self, self._number, size, done)
        if size < DUST:
            transfer.made = size
            self.finish(transfer)
        return transfer

    def set_bandwidth(self, bandwidth: float) -> None:
        """The line carries so much from now on; 0: it is cut."""
        self.flow()
        self.bandwidth = bandwidth
        self.sharing.changed()

    @property
    def sent(self) -> float:
        """Bytes that have left so far."""
        return self._sent + self.rate * (self.events.now - self._at)

    @property
    def busy(self) -> float:
        """Seconds, weighted by the share of the line that was used."""
        return self._busy + self.rate * (self.events.now - self._at) / self.model.bandwidth

    @property
    def queue(self) -> float:
        """Bytes that could be sent and were not yet."""
        return max(0.0, self.made - self.sent)

    @property
    def goodput(self) -> float | None:
        """Bytes/s of late while there was something to send, as senders measure it; None: nobody has sent yet."""
        self.flow()
        return self._goodput

    # For the sharing

    def flow(self) -> None:
        """Account for what was sent since the last time. To be called before and after rates change."""
        now = self.events.now
        seconds = now - self._at
        if seconds:
            sent = self.rate * seconds
            self._sent += sent
            self._busy += sent / self.model.bandwidth
            self._at = now
        since = self._since
        if since is None:
            if self.made - self._sent > DUST:
                self._since, self._marked = now, self._sent
            return
        seconds = now - since
        idle = self.made - self._sent <= DUST
        if seconds >= LONGEST or (idle and seconds >= SHORTEST):
            rate = (self._sent - self._marked) / seconds
            share = 1.0 - math.exp(-seconds / MEMORY)
            self._goodput = rate if self._goodput is None else self._goodput + share * (rate - self._goodput)
            self._since, self._marked = now, self._sent
        if idle:
            self._since = None
            self._sent = self.made

    def finish(self, transfer: Transfer) -> None:
        """All of it has left."""
        transfer.sent = transfer.made
        self.events.push(self.events.now + self.model.rtt / 2, self._arrive, transfer)

    def _arrive(self, transfer: Transfer) -> None:
        if not transfer.over:
            transfer.over = True
            self.arrived += 1
            transfer.done()
