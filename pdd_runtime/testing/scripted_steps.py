"""The steps in which the scripted engine decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from pdd_runtime.testing.scripted_request import ScriptedRequest


class ScriptedSteps:
    """All requests of a batch get their next token at once, as from an engine that computes them in one pass. A
    request that comes while a step is under way is in the next one."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: what a step takes; 0: as long as it takes all others to run once."""
        self._seconds = seconds
        # Dictionaries for their order: who came first is woken first.
        self._batch: dict[ScriptedRequest, None] = {}
        self._coming: dict[ScriptedRequest, None] = {}
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def taking(self, request: ScriptedRequest) -> Iterator[None]:
        """Inside, `request` takes part in every step."""
        self._coming[request] = None
        if not self._batch:
            self._begin(asyncio.get_running_loop().time())
        try:
            yield
        finally:
            self._coming.pop(request, None)
            self._batch.pop(request, None)
            if not self._batch:
                self._begin(asyncio.get_running_loop().time())

    async def next(self, request: ScriptedRequest) -> None:
        """Return when a step of `request` has ended. Raises why it was stopped."""
        if self._seconds > 0:
            await request.wait()
        else:
            await request.pause(0)

    def _begin(self, at: float) -> None:
        """A step of all that are there; none of nobody."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._batch |= self._coming
        self._coming.clear()
        if self._batch and self._seconds > 0:
            self._due = at + self._seconds
            self._timer = asyncio.get_running_loop().call_at(self._due, self._end)

    def _end(self) -> None:
        for request in self._batch:
            request.wake()
        # From when it should have ended, so that what timers are late does not add up; but none are made up for.
        self._begin(max(self._due, asyncio.get_running_loop().time() - self._seconds))
