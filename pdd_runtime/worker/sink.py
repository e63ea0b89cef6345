"""Where the blocks of one fetch land."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdd_runtime.errors import Cancelled


class FetchSink:
    """The `BlockSink` of one fetch: hands its memory to transport threads, and tells the loop what is whole."""

    def __init__(
        self,
        memory: Sequence[memoryview],
        loop: asyncio.AbstractEventLoop,
        received: Callable[[], None],
        whole: Callable[[int], None],
    ) -> None:
        """On the loop, `received` is called for each block that has crossed the network, `whole` with the index of
        one whose memory is filled."""
        self._memory, self._loop, self._received, self._whole = memory, loop, received, whole
        self._closed = False

    def memory(self, index: int) -> memoryview:
        if self._closed:
            raise Cancelled("the fetch has ended, and its memory is others'")
        return self._memory[index]

    def done(self, index: int) -> None:
        self.received()
        self.whole(index)

    def received(self) -> None:
        """A block has come, of whatever layout."""
        self._tell(self._received)

    def whole(self, index: int) -> None:
        """A block's memory is filled."""
        self._tell(lambda: self._whole(index))

    def close(self) -> None:
        """On the loop, when the transport has ended: what comes later is ignored."""
        self._closed = True

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._unless_closed, call)
        except RuntimeError:
            # The loop is closed, so the worker has ended, and its blocks with it.
            if not self._loop.is_closed():
                raise

    def _unless_closed(self, call: Callable[[], None]) -> None:
        if not self._closed:
            call()
