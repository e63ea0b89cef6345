"""The processes that a launcher runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.logs import LogFile
from pdd_runtime.launch.slot import Slot
from pdd_runtime.launch.state import GraphState
from pdd_runtime.plugins.routing import WorkerKey

SLACK = 2.0
"""Seconds that a process has, beyond its patience, to say goodbye."""


class Crew:
    """Starts and ends them; each is kept up until it is told to end. To be used as a context: what cannot start ends it
    with a `LaunchError`, and leaving it waits until all have ended."""

    def __init__(
        self,
        state: GraphState,
        *,
        on_change: Callable[[], None],
        on_line: Callable[[ChildSpec, str], None],
        on_exit: Callable[[WorkerKey], Awaitable[None]],
        on_vacant: Callable[[Slot], None],
    ) -> None:
        """The callbacks are those of `Child`, and `on_vacant(slot)`: who has it is just told to end, and has no
        successor."""
        self.children: list[Child] = []
        self._state, self._on_change, self._on_line, self._on_exit = state, on_change, on_line, on_exit
        self._on_vacant = on_vacant
        self._tasks: dict[Child, asyncio.Task[None]] = {}
        self._group = asyncio.TaskGroup()
        self._kill = False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._group.__aexit__(kind, error, trace)

    def start(self, spec: ChildSpec, *, replaces: bool = False, late: bool = False) -> Child:
        """`replaces` and `late`: as in `Child`."""
        child = Child(
            spec,
            LogFile(self._state.log(spec.pool, spec.index), hide=spec.secrets),
            on_change=self._on_change,
            on_line=self._on_line,
            on_exit=self._on_exit,
            replaces=replaces,
            late=late,
        )
        self.children.append(child)
        self._tasks[child] = self._group.create_task(child.supervise(), name=str(spec))
        return child

    def at(self, slot: Slot) -> Child | None:
        """Who has this place, or will have it."""
        here = (child for child in reversed(self.children) if child.spec.slot == slot)
        return next((child for child in here if not child.stopping and not child.ended), None)

    async def end(self, children: Sequence[Child], patience: float | None = None, grace: float = SLACK) -> bool:
        """Have them drain for `patience` seconds, or as long as is their own, and return when they have ended. What is
        still there `grace` seconds later, or once told to kill, ends by force; then it returns False."""
        tasks = [self._tasks[child] for child in children]
        if not tasks:
            return True
        for child in children:
            child.kill() if self._kill else child.stop(patience)
            if self.at(child.spec.slot) is None:
                self._on_vacant(child.spec.slot)
        _, left = await asyncio.wait(tasks, timeout=(patience or 0.0) + grace)
        if left:
            for child in children:
                child.kill()
            await asyncio.wait(left)
        return not left

    def forget(self, child: Child) -> None:
        """It has ended, and its place is another's, or nobody's."""
        if child in self.children:
            self.children.remove(child)
            del self._tasks[child]

    def kill(self) -> None:
        """End every process now."""
        self._kill = True
        for child in self.children:
            child.kill()
