from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from pdd_tcp.config import TcpConfig
from pdd_tcp.transport import TcpTransport

from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.rpc import Line, Tls
from pdd_runtime.testing.kv_parties import Context
from plugins.transport_tcp.tests.counting import Party, sockets, threads
from tests.waiting import until


@pytest.fixture
async def party() -> AsyncIterator[Party]:
    """Makes transports, closes them at the end, and holds that they leave no thread and no socket."""
    await asyncio.to_thread(lambda: None)
    before = sockets()
    async with AsyncExitStack() as stack:

        def make(
            cluster: str,
            lines: dict[str, Line] | None = None,
            links: dict[str, LinkFacts] | None = None,
            tls: Tls | None = None,
            **config: object,
        ) -> TcpTransport:
            context = Context(cluster, lines, links=links, tls=tls)
            transport = TcpTransport(TcpConfig.model_validate(config), context)
            stack.push_async_callback(transport.close)
            return transport

        yield make
    assert threads() == []
    # A test's own are closed by the loop in its next rounds.
    await until(lambda: sockets() <= before)
