"""One request of the scripted engine, as far as others may end it or let it go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from pdd_runtime.errors import PddError
from pdd_runtime.testing.toy_sequence import ToySequence

T = TypeVar("T")


class ScriptedRequest:
    """Whether it may run, when to seal it, why it was stopped."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.sequence: ToySequence | None = None
        self.admitted = False
        self.seal_at: int | None = None
        self._woken = asyncio.Event()
        self._error: PddError | None = None

    def stop(self, error: PddError) -> None:
        """End it in whatever state it is; its stream raises `error` when it is asked next."""
        self._error = self._error or error
        self.wake()
        self.release()

    def release(self) -> None:
        if self.sequence is not None:
            self.sequence.release()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """Let it go on where it waits, or where it waits next."""
        self._woken.set()

    async def wait(self) -> None:
        """Until it is woken. Raises why it was stopped."""
        await self._woken.wait()
        self._woken.clear()
        self.check()

    async def during(self, work: Awaitable[T]) -> T:
        """Let `work` run to its end, unless stopped."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stopped())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            self.check()
            return task.result()
        finally:
            for one in (task, stopped):
                one.cancel()
            await asyncio.wait({task, stopped})

    async def _stopped(self) -> None:
        with suppress(PddError):
            while True:
                await self.wait()

    async def pause(self, seconds: float) -> None:
        """Let `seconds` pass, and others run, unless stopped."""
        if seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait()
        else:
            await asyncio.sleep(0)
        self.check()
