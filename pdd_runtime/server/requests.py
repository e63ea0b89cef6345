"""The requests that run at a server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.server.request import Running
from pdd_runtime.waiting import over

log = logging.getLogger(__name__)


class Requests:
    """Each in a task of its own. On the event loop alone."""

    def __init__(self, name: str) -> None:
        """`name`: the engine's."""
        self._name = name
        self._tasks: dict[Running, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._tasks)

    def named(self, id: str) -> list[Running]:
        return [one for one in self._tasks if one.id == id]

    async def idle(self) -> None:
        """Return when there is none."""
        await self._idle.wait()

    @asynccontextmanager
    async def running(self, one: Running, run: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
        """Inside, it runs; at the end, whatever ends it, all it held is free."""
        task = self._tasks[one] = asyncio.create_task(self._run(one, run), name=f"{self._name} {one.id}")
        self._idle.clear()
        try:
            yield
        finally:
            task.cancel()
            try:
                await over(task)
            finally:
                self._release(one)  # one that was cancelled before it ran has not done so itself

    def end(self, error: PddError, requests: Iterable[Running] | None = None) -> None:
        """With this error; by default all of them."""
        for one in tuple(self._tasks if requests is None else requests):
            one.fail(error)
            self._tasks[one].cancel()

    async def _run(self, one: Running, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except PddError as error:
            one.fail(error)
        except Exception as error:
            log.exception("request %s failed", one.id)
            why = f"{type(error).__name__}: {error}"
            one.fail(EngineError(f"{self._name} failed", where=f"request {one.id}", why=why))
        finally:
            self._release(one)

    def _release(self, one: Running) -> None:
        """Idempotent."""
        one.release()
        self._tasks.pop(one, None)
        if not self._tasks:
            self._idle.set()
