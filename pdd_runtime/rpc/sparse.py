"""A log that no peer can fill."""

from __future__ import annotations

import logging
import threading

from pdd_runtime.clock import now

BURST = 50
"""Lines that may come at once."""
EVERY = 1.0
"""Seconds to each one after those."""


class SparseLog:
    """For what strangers can cause as often as they like: a line tells how many were left out before it.
    Thread-safe."""

    def __init__(self, log: logging.Logger, burst: int = BURST, every: float = EVERY) -> None:
        self._log, self._burst, self._every = log, burst, every
        self._lock = threading.Lock()
        self._left = float(burst)
        self._at = now()
        self._omitted = 0

    def warning(self, message: str, *args: object) -> None:
        with self._lock:
            time = now()
            self._left = min(self._burst, self._left + (time - self._at) / self._every)
            self._at = time
            if self._left < 1.0:
                self._omitted += 1
                return
            self._left -= 1.0
            omitted, self._omitted = self._omitted, 0
        if omitted:
            message, args = f"{message} (%d lines like it were left out before)", (*args, omitted)
        self._log.warning(message, *args)
