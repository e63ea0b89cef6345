"""When a process should end: told by SIGTERM, or left alone by the process that started it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

_LONGEST = 256
"""Bytes of an order."""


class Lifetime:
    """Whoever starts a process of ours holds the writing end of its stdin: at EOF there is nobody left to run for, and
    a line `drain SECONDS` is a SIGTERM that says how long.
    SIGINT is ignored: Ctrl-C reaches the whole process group, and what follows is the launcher's to say."""

    def __init__(self) -> None:
        """On the running loop, in the main thread."""
        self.terminated = asyncio.Event()
        """SIGTERM came: finish what runs, then end."""
        self.patience: float | None = None
        """Seconds that whoever told it to end gives to what runs; None: they did not say."""
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
            rest = b""
            while data := os.read(0, 4096):
                *lines, rest = (rest[-_LONGEST:] + data).split(b"\n")
                for line in lines:
                    self._call(partial(self._order, line))
        self._call(self.orphaned.set)

    def _order(self, line: bytes) -> None:
        word, _, seconds = line.partition(b" ")
        if word == b"drain":
            with suppress(ValueError):
                self.patience = float(seconds)
            self.terminated.set()

    def _call(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process is ending anyway
            self._loop.call_soon_threadsafe(call)


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
