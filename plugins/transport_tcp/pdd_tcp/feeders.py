"""The threads that wait for blocks that are not made yet."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

PATIENCE = 0.05
"""Seconds that a thread waits for one session's next block while no other session waits for a thread."""
IMPATIENCE = 0.002
"""The same while others do."""


Pull = Callable[[float], bool]
"""Takes the blocks of one session that are there, waiting so many seconds for the next; True while more are to come."""


class Feeders:
    """Sessions take turns on a few threads, since a feed can only be asked and does not call."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._changed = threading.Condition()
        self._waiting: deque[Pull] = deque()
        self._idle = 0
        self._closed = False
        self._threads: list[threading.Thread] = []

    def add(self, pull: Pull) -> None:
        """Any thread."""
        with self._changed:
            self._waiting.append(pull)
            if self._idle >= len(self._waiting) or len(self._threads) == self._most:
                self._changed.notify()
                return
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads) + 1}", daemon=True)
            self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Every session has been closed; return when all threads have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed)
                self._idle -= 1
                if not self._waiting:
                    return
                pull, patience = self._waiting.popleft(), IMPATIENCE if self._waiting else PATIENCE
            if pull(patience):
                with self._changed:
                    self._waiting.append(pull)
                    # This thread is free again; another one is woken only where there is more to do.
                    if len(self._waiting) > 1:
                        self._changed.notify()
