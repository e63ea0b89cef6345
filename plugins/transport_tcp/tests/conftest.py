from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

# The parties of a transfer are also used by processes of their own (`tcp_peer.py`).
sys.path.insert(0, str(Path(__file__).parent))

from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport
from tcp_parties import Context

from pdd_runtime.rpc import Line

Party = Callable[..., TcpTransport]


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("pdd-tcp"))


def sockets() -> int:
    """Of this process."""
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


@pytest.fixture
async def party() -> AsyncIterator[Party]:
    """Makes transports, closes them at the end, and holds that they leave no thread and no socket."""
    await asyncio.to_thread(lambda: None)
    before = sockets()
    async with AsyncExitStack() as stack:

        def make(cluster: str, lines: dict[str, Line] | None = None, **config: object) -> TcpTransport:
            transport = TcpTransport(TcpConfig.model_validate(config), Context(cluster, lines))
            stack.push_async_callback(transport.close)
            return transport

        yield make
    assert threads() == []
    assert sockets() == before
