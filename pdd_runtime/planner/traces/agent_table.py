"""Coding agents' sessions as a table: CSV with `session`, `t`, `sub`, `isl`, `osl` and `hit_inf`, the prompt's leading
tokens that an earlier request of the session had, in blocks of 64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from pdd_runtime.planner.content import leading
from pdd_runtime.planner.session import Spans
from pdd_runtime.planner.traces.recorded import Asked, Recorded
from pdd_runtime.planner.traces.table import rows, wrong_row

COLUMNS = ("session", "t", "sub", "isl", "osl", "hit_inf")
BLOCK = 64
_SPEED = 50.0
"""Tokens a second. The table has no answers' times: from a request's time to the next one, so much is answering and
the rest is thinking."""


@dataclass
class _Thread:
    """One agent's requests."""

    sub: bool
    start: float
    last: float = 0.0
    asked: list[Asked] = field(default_factory=list)


class _Session:
    def __init__(self, numbers: Iterator[int]) -> None:
        self.threads: list[_Thread] = []
        self._numbers = numbers
        self._asked: list[tuple[int, Spans, _Thread]] = []
        self._whole: dict[int, int] = {}
        """Of prompts by their whole blocks: the latest."""

    def add(self, at: float, sub: bool, prompt: int, output: int, hit: int) -> None:
        source = self._source(hit) if hit else None
        known = leading(source[1], min(hit, prompt - 1)) if source else ()
        fresh = prompt - sum(length for _, length in known)
        spans = (*known, (next(self._numbers), fresh))
        thread = self._thread(at, sub, source[2] if source else None)
        last = thread.asked[-1] if thread.asked else None
        think = max(0.0, at - thread.last - last.output / _SPEED) if last else 0.0
        thread.asked.append(Asked(prompt, output, think, spans))
        thread.last = at
        self._whole[prompt // BLOCK * BLOCK] = len(self._asked)
        self._asked.append((prompt, spans, thread))

    def _source(self, hit: int) -> tuple[int, Spans, _Thread] | None:
        """Which earlier prompt it begins like: the latest that ends there, else the latest that is long enough."""
        if hit in self._whole:
            return self._asked[self._whole[hit]]
        return next((asked for asked in reversed(self._asked) if asked[0] >= hit), None)

    def _thread(self, at: float, sub: bool, source: _Thread | None) -> _Thread:
        if source is not None and source.sub == sub:
            return source
        thread = None if sub else next((thread for thread in self.threads if not thread.sub), None)
        if thread is None:
            thread = _Thread(sub, at)
            self.threads.append(thread)
        return thread

    def recorded(self) -> Iterator[Recorded]:
        begun = self.threads[0].start
        for number, thread in enumerate(self.threads):
            yield Recorded(None, tuple(thread.asked), max(0.0, thread.start - begun) if number else None)


def read(path: Path) -> Iterator[Recorded]:
    """Sessions in the table's order; agents that an agent began come behind it."""
    numbers = count()
    session, name, last = _Session(numbers), "", 0.0
    for where, cells in rows(path, COLUMNS):
        try:
            at, (sub, prompt, output, hit) = float(cells[1]), (int(cell) for cell in cells[2:])
            if not (0 <= at < float("inf")) or min(sub, prompt, output, hit) < 0:
                raise ValueError("no number may be below 0")
        except ValueError as error:
            raise wrong_row(where, error, COLUMNS) from error
        # Names may have been cut until they are all alike: a clock that begins anew tells sessions apart as well.
        if session.threads and (cells[0] != name or at < last or (at == 0 and not sub)):
            yield from session.recorded()
            session = _Session(numbers)
        name, last = cells[0], at
        session.add(at, bool(sub), max(1, prompt), max(1, output), hit)
    if session.threads:
        yield from session.recorded()
