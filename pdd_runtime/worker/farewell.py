"""A worker's end, as those hear of it who use it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdd_runtime.watchers import Watchers


class Farewell:
    """Whoever watches the worker is told that it drains, and goes on using it as long as a session of its own needs
    it: then it leaves. So the worker need not guess which requests belong to what it has begun."""

    def __init__(self) -> None:
        self.said = False
        self._visitors: Counter[str] = Counter()
        self._alone = asyncio.Event()
        self._alone.set()
        self._watchers: Watchers[[]] = Watchers()

    def say(self) -> None:
        """The worker takes no new session."""
        self.said = True
        self._watchers.tell()

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` when it is said, until the function returned is called."""
        return self._watchers.add(callback)

    @contextmanager
    def visit(self, name: str) -> Iterator[None]:
        """Who is called so watches the worker, inside."""
        self._visitors[name] += 1
        self._alone.clear()
        try:
            yield
        finally:
            self._visitors -= Counter([name])
            if not self._visitors:
                self._alone.set()

    @property
    def visitors(self) -> tuple[str, ...]:
        """Who watches."""
        return tuple(self._visitors)

    async def alone(self) -> None:
        """Return when nobody watches."""
        await self._alone.wait()
