"""A server and its clients over real sockets, closed after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pdd_runtime.rpc import Greeting, RpcConnection, RpcServer, Tls, connect
from tests.certificates import Issuer

Dial = Callable[..., Awaitable[RpcConnection]]


@pytest.fixture
def greeting() -> Callable[..., Greeting]:
    def make(name: str = "main/0", **fields: Any) -> Greeting:
        return Greeting(**({"graph": "g", "secret": "hush-hush", "cluster": "dc-a", "name": name} | fields))

    return make


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> Tls | None:
    """What both sides show: every promise holds with it as without."""
    return Issuer("g", tmp_path).tls("dc-a") if request.param == "tls" else None


@pytest.fixture
async def server(greeting: Callable[..., Greeting], tls: Tls | None) -> AsyncIterator[RpcServer]:
    server = RpcServer(greeting(), tls=tls)
    yield server
    await server.close()


@pytest.fixture
async def dial(server: RpcServer, greeting: Callable[..., Greeting], tls: Tls | None) -> AsyncIterator[Dial]:
    """Start the server and connect to it, as often as called."""
    connections: list[RpcConnection] = []
    endpoint = ""

    async def make(**options: Any) -> RpcConnection:
        nonlocal endpoint
        endpoint = endpoint or await server.start("127.0.0.1")
        connections.append(await connect(endpoint, greeting("frontend/0"), **{"tls": tls, **options}))
        return connections[-1]

    yield make
    for connection in connections:
        await connection.close()
