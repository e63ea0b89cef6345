"""Time in a simulation: what happens when. One heap, no thread, no clock of the machine."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[..., Any]


class Handle:
    """Something that will happen, and can be cancelled. Only `Events` makes them."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call


class Events:
    """What happens at the same time happens in the order in which it was asked for."""

    # The heap has each time once, and nothing else: floats compare several times as fast as tuples that begin so.

    __slots__ = ("_due", "_times", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._times: list[float] = []
        self._due: dict[float, list[tuple[Call, tuple[Any, ...]]]] = {}
        """What happens at each of them, in order."""

    def push(self, time: float, call: Call, *args: Any) -> None:
        """Have `call(*args)` happen at `time`, which is not before now. Cheaper than `at`: it cannot be cancelled."""
        due = self._due.get(time)
        if due is None:
            self._due[time] = [(call, args)]
            heappush(self._times, time)
        else:
            due.append((call, args))

    def at(self, time: float, call: Call, *args: Any) -> Handle:
        """The same; the answer can be given to `cancel`."""
        handle = Handle(call)
        self.push(time, _happen, handle, args)
        return handle

    def cancel(self, handle: Handle) -> None:
        """It will not happen. Idempotent, also after it has."""
        handle.call = None

    def run(self, until: float = float("inf")) -> None:
        """Let all happen that is due by `until`; where nothing is left `now` stays at the last event."""
        times, due, pop = self._times, self._due, heappop
        while times and times[0] <= until:
            self.now = time = pop(times)
            # What is asked for at this time from now on comes behind all of these.
            for call, args in due.pop(time):
                call(*args)


def _happen(handle: Handle, args: tuple[Any, ...]) -> None:
    call, handle.call = handle.call, None
    if call is not None:
        call(*args)
