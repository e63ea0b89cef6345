"""The proxy leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pdd_runtime.testing.tcp_proxy import TcpProxy
from tests.waiting import until


def sockets() -> int:
    return sum(path.is_socket() for path in Path("/proc/self/fd").iterdir())


@pytest.fixture
def without_collection() -> Iterator[None]:
    """What is closed is closed by somebody."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collection")
@pytest.mark.parametrize("rounds", range(6))
async def test_it_may_end_at_any_moment_of_a_connections_beginning(rounds: int) -> None:
    """So many rounds of the loop after the client has connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        before = sockets()
        async with TcpProxy(f"{host}:{port}") as proxy:
            name, _, number = proxy.endpoint.partition(":")
            with closing(socket.create_connection((name, int(number)))):
                for _ in range(rounds):
                    await asyncio.sleep(0)
        await until(lambda: sockets() <= before)
