"""Several reads that are one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Tally:
    """What reads come to together: `done` has what their checks found, or the first error, when all have ended."""

    def __init__(self, count: int) -> None:
        self.done: Future[list[int]] = Future()
        self._left, self._lock = count, threading.Lock()
        self._found: list[int] = []
        self._error: BaseException | None = None

    def counted(self, check: Callable[[], list[int]]) -> Callable[[Future[None]], None]:
        """To be called, in any thread, when a read has ended: `check` then looks at what it brought."""

        def count(read: Future[None]) -> None:
            found: list[int] = []
            error = read.exception()
            if error is None:
                try:
                    found = check()
                except BaseException as caught:
                    error = caught
            with self._lock:
                self._left -= 1
                self._found += found
                self._error = self._error or error
                last = not self._left
            if last and self._error is not None:
                self.done.set_exception(self._error)
            elif last:
                self.done.set_result(self._found)

        return count
