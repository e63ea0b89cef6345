"""How fast blocks leave for one cluster."""

from __future__ import annotations

import math

from pdd_runtime.clock import now
from pdd_runtime.plugins.transport import LinkTelemetry

MEMORY = 10.0
"""Seconds of business after which what was counts for a third."""


class Meter:
    """Of the seconds in which something was offered and not yet taken, and the bytes taken in them."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._queue = self._sent = 0
        self._bytes = self._busy = 0.0
        self._at = now()

    def offered(self, nbytes: int) -> None:
        self._pass()
        self._queue += nbytes

    def taken(self, nbytes: int) -> None:
        self._pass()
        self._queue -= nbytes
        self._sent += nbytes
        self._bytes += nbytes

    def dropped(self, nbytes: int) -> None:
        """Offered, and not taken."""
        self._pass()
        self._queue -= nbytes

    def telemetry(self) -> LinkTelemetry:
        goodput = self._bytes / self._busy if self._sent and self._busy > 0 else None
        return LinkTelemetry(cluster=self._cluster, goodput=goodput, queue=self._queue, sent=self._sent)

    def _pass(self) -> None:
        time = now()
        if self._queue:
            kept = math.exp((self._at - time) / MEMORY)
            self._bytes, self._busy = self._bytes * kept, self._busy * kept + time - self._at
        self._at = time
