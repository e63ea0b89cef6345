"""Which requests the engine works on."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from pdd_runtime.watchers import Watchers

REMEMBERED = 4096
"""Ended requests that are still known as such."""


class Activity:
    """A request is *running* while one of its engine streams may still publish blocks; then *ended*."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._watchers: Watchers[str] = Watchers()

    @property
    def running(self) -> int:
        """Engine streams that may still publish."""
        return self._running.total()

    def state(self, request_id: str) -> Literal["unseen", "running", "ended"]:
        if request_id in self._running:
            return "running"
        return "ended" if request_id in self._ended else "unseen"

    @contextmanager
    def publishing(self, request_id: str) -> Iterator[Callable[[], None]]:
        """The request publishes from here to the end of the `with`, or until the function given is called."""
        over = False

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                self._end(request_id)

        self._running[request_id] += 1
        self._watchers.tell(request_id)
        try:
            yield end
        finally:
            end()

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback` with the request's id whenever a stream begins or ends, until the function returned is
        called."""
        return self._watchers.add(callback)

    def _end(self, request_id: str) -> None:
        self._running[request_id] -= 1
        if not self._running[request_id]:
            del self._running[request_id]
            self._ended[request_id] = None
            self._ended.move_to_end(request_id)
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
        self._watchers.tell(request_id)
