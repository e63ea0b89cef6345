"""What a worker sees of one of its ways to other clusters, and for how long it holds."""

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
