"""What is seen of one of a worker's ways to other clusters, by itself and by who has it send."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pdd_runtime.plugins.transport import LinkTelemetry

STALL = 1.0
"""Seconds in which a way may let nothing through without being called stalled."""


class Seen(NamedTuple):
    """What one sender says of one way, at one moment."""

    source: str
    """The cluster that it sends from."""
    telemetry: LinkTelemetry
    """With the goodput of when it was not stalled."""
    stalled: float | None = None
    """Seconds; None: it has not tried of late."""
    idle: float = 0.0
    """Seconds since it has sent something."""


class Sender:
    """For how long it has got nothing through. When it gives up, that is remembered for as long as it lasted: so a way
    that was cut is tried again and again, ever more seldom, until something gets through."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._last: LinkTelemetry | None = None
        self._goodput: float | None = None
        self._moved = self._since = 0.0
        """When something was last sent, and since when something has been waiting."""
        self._lasted = self._until = 0.0

    def update(self, telemetry: LinkTelemetry, at: float) -> None:
        """What it says at that moment."""
        before = self._last
        waited = at - self._since if before is not None and before.queue else 0.0
        if before is None or telemetry.sent != before.sent:
            if waited <= STALL:
                self._goodput = telemetry.goodput
            self._moved = self._since = self._until = at
        elif telemetry.queue and not before.queue:
            self._since = at
        elif before.queue and not telemetry.queue and waited > STALL:
            self._lasted, self._until = waited, at + waited
        same = telemetry.goodput == self._goodput
        self._last = telemetry if same else msgspec.structs.replace(telemetry, goodput=self._goodput)

    def seen(self, at: float) -> Seen | None:
        """None: it has said nothing yet."""
        if self._last is None:
            return None
        waits = bool(self._last.queue)
        waited = at - self._since if waits else 0.0
        stalled = max(waited if waited > STALL else 0.0, self._until - at)
        return Seen(self._source, self._last, stalled if waits or stalled > 0.0 else None, at - self._moved)


class Fetches:
    """What this driver has a worker send to one other cluster. A sender knows of no fetch whose beginning is lost."""

    def __init__(self, source: str, target: str) -> None:
        self._target, self._sender = target, Sender(source)
        self._sent = self._waiting = 0

    def seen(self, at: float) -> Seen | None:
        """Its silence alone: the rest is the sender's to say. None: nothing is known."""
        seen = self._sender.seen(at)
        if seen is None or seen.stalled is None:
            return None
        return seen._replace(telemetry=LinkTelemetry(cluster=self._target))

    def waits(self, more: int, at: float) -> None:
        """So many fetches more wait for what has been made, or fewer."""
        self._waiting += more
        self._tell(at)

    def moved(self, nbytes: int, at: float) -> None:
        """So many bytes more have come."""
        self._sent += nbytes
        self._tell(at)

    def _tell(self, at: float) -> None:
        self._sender.update(LinkTelemetry(cluster=self._target, sent=self._sent, queue=self._waiting), at)


class Fetch:
    """One of them, from its beginning to its end."""

    def __init__(self, fetches: Fetches) -> None:
        self._fetches = fetches
        self._bytes = 0
        self._waits = self._over = False

    def made(self, at: float) -> None:
        """All that it is for has been made: from now on it waits for the way alone."""
        if not self._waits and not self._over:
            self._waits = True
            self._fetches.waits(1, at)

    def has(self, nbytes: int, at: float) -> None:
        """So much has come so far."""
        if nbytes > self._bytes:
            more, self._bytes = nbytes - self._bytes, nbytes
            self._fetches.moved(more, at)

    def end(self, at: float) -> None:
        """Whole or not."""
        self._over = True
        if self._waits:
            self._waits = False
            self._fetches.waits(-1, at)
