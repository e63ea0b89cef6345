"""The places in the scripted engine's batch."""

from __future__ import annotations

from collections import deque

from pdd_runtime.testing.scripted_request import ScriptedRequest


class ScriptedBatch:
    """So many requests at once; the others wait, first come, first served."""

    def __init__(self, limit: int) -> None:
        self.running = 0
        self._limit = limit
        self._queue: deque[ScriptedRequest] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def enter(self, request: ScriptedRequest) -> None:
        """Wait for a place."""
        self._queue.append(request)
        self._admit()
        await request.wait()

    def leave(self, request: ScriptedRequest) -> None:
        """Give its place, or its place in the queue, to the next. Idempotent."""
        if request.admitted:
            request.admitted = False
            self.running -= 1
            self._admit()
        elif request in self._queue:
            self._queue.remove(request)

    def _admit(self) -> None:
        while self._queue and self.running < self._limit:
            request = self._queue.popleft()
            request.admitted = True
            request.wake()
            self.running += 1
