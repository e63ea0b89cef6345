"""When a process should end: told by SIGTERM, or left alone by the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


class Lifetime:
    """Whoever starts a process of ours holds the writing end of its stdin: at EOF there is nobody left to run for.
    SIGINT is ignored: Ctrl-C reaches the whole process group, and what follows is the launcher's to say."""

    def __init__(self) -> None:
        """On the running loop, in the main thread."""
        self.terminated = asyncio.Event()
        """SIGTERM came: finish what runs, then end."""
        self.orphaned = asyncio.Event()
        """The parent is gone: end now."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGTERM, self.terminated.set)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A daemon thread on the bare descriptor: a read that never returns must not keep the interpreter from ending.
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    async def over(self) -> None:
        """Return at the first sign."""
        await race(self.terminated.wait(), self.orphaned.wait())

    def _read(self) -> None:
        with suppress(OSError):  # no stdin at all is the same as one at its end
            while os.read(0, 4096):
                pass
        with suppress(RuntimeError):  # the loop is closed: the process is ending anyway
            self._loop.call_soon_threadsafe(self.orphaned.set)


async def race(*coroutines: Coroutine[Any, Any, object]) -> int:
    """Run them until the first ends; cancel the others and wait for them. Returns which was first, or raises what
    it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    first = next(index for index, task in enumerate(tasks) if task in done)
    tasks[first].result()
    return first
