"""A server and its clients over real sockets, closed after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pdd_runtime.rpc import Greeting, RpcConnection, RpcServer, connect

Dial = Callable[..., Awaitable[RpcConnection]]


@pytest.fixture
def greeting() -> Callable[..., Greeting]:
    def make(name: str = "main/0", **fields: Any) -> Greeting:
        return Greeting(**({"graph": "g", "secret": "hush-hush", "cluster": "dc-a", "name": name} | fields))

    return make


@pytest.fixture
async def server(greeting: Callable[..., Greeting]) -> AsyncIterator[RpcServer]:
    server = RpcServer(greeting())
    yield server
    await server.close()


@pytest.fixture
async def dial(server: RpcServer, greeting: Callable[..., Greeting]) -> AsyncIterator[Dial]:
    """Start the server and connect to it, as often as called."""
    connections: list[RpcConnection] = []
    endpoint = ""

    async def make(**options: Any) -> RpcConnection:
        nonlocal endpoint
        endpoint = endpoint or await server.start("127.0.0.1")
        connections.append(await connect(endpoint, greeting("frontend/0"), **options))
        return connections[-1]

    yield make
    for connection in connections:
        await connection.close()
