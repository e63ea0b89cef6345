"""Where the blocks of one fetch land."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdd_runtime.errors import Cancelled


class FetchSink:
    """The `BlockSink` of one fetch: hands its memory to transport threads, and tells the loop what is whole."""

    def __init__(
        self, memory: Sequence[memoryview], loop: asyncio.AbstractEventLoop, done: Callable[[int], None]
    ) -> None:
        """`done` is called on the loop."""
        self._memory, self._loop, self._done = memory, loop, done
        self._closed = False

    def memory(self, index: int) -> memoryview:
        if self._closed:
            raise Cancelled("the fetch has ended, and its memory is others'")
        return self._memory[index]

    def done(self, index: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._land, index)
        except RuntimeError:
            # The loop is closed, so the worker has ended, and its blocks with it.
            if not self._loop.is_closed():
                raise

    def close(self) -> None:
        """On the loop, when the transport has ended: what comes later is ignored."""
        self._closed = True

    def _land(self, index: int) -> None:
        if not self._closed:
            self._done(index)
