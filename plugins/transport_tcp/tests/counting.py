"""What of the transport there is in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from pdd_tcp.transport import TcpTransport

from pdd_runtime.clock import now

Party = Callable[..., TcpTransport]
"""Makes the transport of a worker."""


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("pdd-tcp"))


def sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


async def eventually(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what has no event of its own. Raises `AssertionError` when it does not come."""
    until = now() + seconds
    while not true():
        assert now() < until, "it did not come"
        await asyncio.sleep(0.01)
