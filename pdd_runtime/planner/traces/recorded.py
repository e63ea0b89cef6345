"""What every format gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdd_runtime.planner.session import Spans


class Asked(NamedTuple):
    """A recorded request. Lengths are tokens."""

    prompt: int
    output: int
    think: float
    """Seconds from the end of the one before."""
    spans: Spans | None
    """The last chain is this request's own; None: what it had in common with others was not recorded."""


class Recorded(NamedTuple):
    """A recorded session."""

    start: float | None
    """Seconds on the recording's clock; None: only sessions' own clocks were recorded."""
    requests: tuple[Asked, ...]
    delay: float | None = None
    """Of a session that the one before began: seconds after that one's start."""


class Extent(NamedTuple):
    """How much was recorded."""

    requests: int
    sessions: int
    seconds: float
    """From the first start to the last."""

    @staticmethod
    def of(sessions: Iterator[Recorded]) -> Extent:
        requests, first, count, last = 0, None, 0, 0.0
        for session in sessions:
            requests += len(session.requests)
            count += session.delay is None
            if session.start is not None:
                first = session.start if first is None else first
                last = session.start
        return Extent(requests, count, last - (first or 0.0))
