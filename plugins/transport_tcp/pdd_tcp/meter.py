"""How much goes over a link, and how fast."""

from __future__ import annotations

import math

SHORTEST, LONGEST = 0.1, 0.5
"""Seconds of one sample. A shorter burst says how fast this host copies, not how fast the link is."""
MEMORY = 2.0
"""Seconds after which a sample counts for 1/e."""


class Meter:
    """Counts payload bytes of one link. Times are the caller's (`clock.now`); not thread-safe."""

    def __init__(self) -> None:
        self.goodput: float | None = None
        """Bytes/s while there was something to send: samples, weighted by their length and their age."""
        self.queue = 0
        """Bytes that could be sent and were not yet."""
        self.sent = 0
        self._since = 0.0
        self._bytes = 0

    def made(self, nbytes: int, at: float) -> None:
        """So many bytes more can be sent."""
        if not self.queue:
            self._since, self._bytes = at, 0
        self.queue += nbytes

    def left(self, nbytes: int, at: float) -> None:
        """So many of them have been sent."""
        self.sent += nbytes
        self._bytes += nbytes
        self._less(nbytes, at)

    def dropped(self, nbytes: int, at: float) -> None:
        """So many of them will not be sent."""
        self._less(nbytes, at)

    def _less(self, nbytes: int, at: float) -> None:
        self.queue -= nbytes
        seconds = at - self._since
        if seconds >= LONGEST or (not self.queue and seconds >= SHORTEST):
            rate = self._bytes / seconds
            share = 1.0 - math.exp(-seconds / MEMORY)
            self.goodput = rate if self.goodput is None else self.goodput + share * (rate - self.goodput)
            self._since, self._bytes = at, 0
