"""Ends what a dead launcher left behind."""

from __future__ import annotations

import asyncio
import signal

from pdd_runtime.clock import now
from pdd_runtime.launch.identity import send
from pdd_runtime.launch.state import Launcher, Recorded

_POLL = 0.05
_GRACE = 3.0
"""Seconds that processes get to notice on their own that their launcher is dead (their stdin has ended)."""
_TERM = 5.0
"""Seconds from SIGTERM to SIGKILL."""


async def end_left(launcher: Launcher | None) -> tuple[Recorded, ...]:
    """Wait for the processes of a dead launcher to end, and make those end that do not. Returns the latter."""
    if launcher is None or await _gone(launcher, _GRACE):
        return ()
    left = launcher.left
    for number, patience in ((signal.SIGTERM, _TERM), (signal.SIGKILL, _TERM)):
        for process in launcher.left:
            send(process.pid, process.birth, number)
        if await _gone(launcher, patience):
            break
    return left


async def _gone(launcher: Launcher, patience: float) -> bool:
    deadline = now() + patience
    while launcher.left:
        if now() > deadline:
            return False
        await asyncio.sleep(_POLL)
    return True
