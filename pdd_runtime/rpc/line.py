"""An emulated one-way network line: when bytes that enter it now come out at the far end."""

from __future__ import annotations

import random
import threading


class Line:
    """First in, first out, at a fixed rate, behind a propagation delay. Thread-safe.

    All senders of one process to one cluster share one line, so that their traffic queues behind each other as
    on a real one. A sender of bulk enters it chunk by chunk, each only when the one before has left: then a
    small message of another sender waits for one chunk at most.
    """

    def __init__(self, bandwidth: float, delay: float, jitter: float = 0.0, seed: int = 0) -> None:
        """`bandwidth` in bits/s, `delay` one way in seconds; `jitter` adds up to so many seconds, uniformly,
        from a generator of its own that `seed` starts."""
        if bandwidth <= 0 or delay < 0 or jitter < 0:
            raise ValueError(f"no such line: bandwidth {bandwidth}, delay {delay}, jitter {jitter}")
        self.bandwidth, self.delay, self.jitter = bandwidth, delay, jitter
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._last_arrival = 0.0
        self._cut_until = 0.0

    def reserve(self, nbytes: int, now: float) -> tuple[float, float]:
        """Enter `nbytes` at `now` (`pdd_runtime.clock.now`) and return `(leaves_at, arrives_at)` on that clock.

        `leaves_at` is when the line has taken the last byte, so when the next may enter. `arrives_at` is when
        it is at the far end, never before anything that entered earlier.
        """
        with self._lock:
            leaves_at = max(now, self._free_at, self._cut_until) + nbytes * 8 / self.bandwidth
            arrives_at = leaves_at + self.delay
            if self.jitter:
                arrives_at += self._random.uniform(0.0, self.jitter)
            arrives_at = max(arrives_at, self._last_arrival)
            self._free_at, self._last_arrival = leaves_at, arrives_at
            return leaves_at, arrives_at

    def cut(self, until: float) -> None:
        """Take nothing in before `until`, on that clock: what is sent waits at this end, as on a real line it would be
        sent again and again. What has entered still arrives."""
        with self._lock:
            self._cut_until = until

    def comes(self, now: float) -> float:
        """When a small message that the far end sends at `now` is here, where both directions are cut together."""
        return max(now, self._cut_until) + self.delay
