"""Recorded sessions as a workload's."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pdd_runtime.planner.content import leading
from pdd_runtime.planner.generator import Columns, first_turn
from pdd_runtime.planner.session import Session, Spans, Turn
from pdd_runtime.planner.traces.recorded import Asked, Extent, Recorded
from pdd_runtime.planner.traces.trace import Trace
from pdd_runtime.planner.workload_error import WorkloadError

if TYPE_CHECKING:
    from pdd_runtime.planner.workload import Workload


def replay(workload: Workload, trace: Trace, seed: int, name: str = "") -> Iterator[Session]:
    """One pass over the recording, read as it is taken, in the order of starts.

    Recorded starts are stretched to the workload's `rate`, where it has one. Sessions without them begin as the
    workload's `arrivals` says, or, in a closed loop, one after another; sessions that others began begin so long after
    those. Where it was not recorded what prompts had in common, the workload's `hit` and `prefixes` say it."""
    columns = Columns(seed, name)
    turns = _Turns(workload, trace, columns)
    waiting: list[tuple[float, int, tuple[Turn, ...], int]] = []
    number, start = 0, None
    begins = _Begins(workload, trace, columns)
    for order, recorded in enumerate(trace.recorded()):
        if recorded.delay is None:
            start = begins(recorded)
        made, prefix = turns.of(order, recorded)
        if start is None:
            yield Session(number, None, prefix, made)
            number += 1
            continue
        heappush(waiting, (start + (recorded.delay or 0.0), order, made, prefix))
        # What has not been read yet begins no earlier than the latest session that was.
        while waiting and waiting[0][0] <= start:
            yield _session(heappop(waiting), number)
            number += 1
    while waiting:
        yield _session(heappop(waiting), number)
        number += 1
    if not number:
        raise WorkloadError("the trace is empty", where=trace.file, fix="name a file that has requests")


def _session(waiting: tuple[float, int, tuple[Turn, ...], int], number: int) -> Session:
    start, _, turns, prefix = waiting
    return Session(number, start, prefix, turns)


class _Begins:
    """When recorded sessions begin, in seconds."""

    def __init__(self, workload: Workload, trace: Trace, columns: Columns) -> None:
        self._closed = workload.users > 0
        self._stretch, self._first = 1.0, 0.0
        self._last = 0.0
        self._starts: Iterator[float] | None = None
        if workload.rate is None or self._closed:
            return
        extent = Extent.of(trace.recorded())
        if not trace.has_times:
            each = extent.requests / max(1, extent.sessions)
            self._starts = workload.arrivals.starts(workload.rate / each, columns.rng("arrivals"))
        elif extent.requests > 1 and extent.seconds > 0:
            self._stretch = (extent.requests - 1) / extent.seconds / workload.rate

    def __call__(self, recorded: Recorded) -> float | None:
        if self._closed:
            return None
        if self._starts is not None:
            return next(self._starts)
        # Clocks that were set back in a recording stand still here.
        self._last = max(self._last, (recorded.start or 0.0) * self._stretch)
        return self._last


class _Turns:
    """Recorded requests as turns, changed as the trace says."""

    def __init__(self, workload: Workload, trace: Trace, columns: Columns) -> None:
        self._trace = trace
        self._hits = columns.numbers("hit", workload.hit)
        self._prefixes = columns.below("prefix", workload.prefixes)

    def of(self, number: int, recorded: Recorded) -> tuple[tuple[Turn, ...], int]:
        """And the shared prefix that the first one begins with."""
        prefix = 0 if self._trace.has_content else next(self._prefixes)
        return tuple(self._turn(number, asked, prefix) for asked in recorded.requests), prefix

    def _turn(self, number: int, asked: Asked, prefix: int) -> Turn:
        trace = self._trace
        prompt, output = (max(1, round(length * trace.scale)) for length in (asked.prompt, asked.output))
        prompt, output = min(prompt, trace.longest_prompt or prompt), min(output, trace.longest_output or output)
        if asked.spans is None:
            return first_turn(number, prefix, prompt, next(self._hits), output)
        known = asked.spans[:-1]
        known = leading(known if trace.scale == 1 else _scaled(known, trace.scale), prompt - 1)
        reused = sum(length for _, length in known)
        think = asked.think if trace.longest_think is None else min(asked.think, trace.longest_think)
        return Turn(reused, prompt - reused, output, think, (*known, (asked.spans[-1][0], prompt - reused)))


def _scaled(spans: Spans, scale: float) -> Spans:
    """Ends are rounded, not lengths: a chain begins at the same place in every prompt, so equal parts stay equal."""
    scaled, begin = [], 0
    for chain, length in spans:
        scaled.append((chain, round((begin + length) * scale) - round(begin * scale)))
        begin += length
    return tuple(span for span in scaled if span[1])
