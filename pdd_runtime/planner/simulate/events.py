"""Time in a simulation: what happens when. One heap, no thread, no clock of the machine."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Call = Callable[..., Any]


class Handle:
    """Something that will happen, and can be cancelled. Only `Events` makes them."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call


class Events:
    """What happens at the same time happens in the order in which it was asked for."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._number = count().__next__

    def __len__(self) -> int:
        """Events to come, those that were cancelled among them."""
        return len(self._heap)

    def push(self, time: float, call: Call, *args: Any) -> None:
        """Have `call(*args)` happen at `time`, which is not before now. Cheaper than `at`: it cannot be cancelled."""
        heappush(self._heap, (time, self._number(), call, args))

    def at(self, time: float, call: Call, *args: Any) -> Handle:
        """The same; the answer can be given to `cancel`."""
        handle = Handle(call)
        heappush(self._heap, (time, self._number(), _happen, (handle, args)))
        return handle

    def cancel(self, handle: Handle) -> None:
        """It will not happen. Idempotent, also after it has."""
        handle.call = None

    def run(self, until: float = float("inf")) -> None:
        """Let all happen that is due by `until`; where nothing is left `now` stays at the last event."""
        heap, pop = self._heap, heappop
        while heap and heap[0][0] <= until:
            self.now, _, call, args = pop(heap)
            call(*args)


def _happen(handle: Handle, args: tuple[Any, ...]) -> None:
    call, handle.call = handle.call, None
    if call is not None:
        call(*args)
