"""Ctrl-C, once and twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdd_runtime.launch.supervisor import Supervisor


@contextmanager
def stopped_by_signals(supervisor: Supervisor, on_signal: Callable[[int], None]) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP drains, the second kills. `on_signal(n)` hears of the n-th."""
    loop = asyncio.get_running_loop()
    seen = 0

    def take() -> None:
        nonlocal seen
        seen += 1
        on_signal(seen)
        if seen == 1:
            supervisor.stop()
        else:
            supervisor.kill()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, take)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
