"""What every part of the transport suite begins with."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

import pytest
import pytest_asyncio
from pydantic import BaseModel

from pdd_runtime.clock import now
from pdd_runtime.plugins.transport import Transport
from pdd_runtime.rpc import Line, Tls
from pdd_runtime.testing.kv_parties import LAYOUT, Context, StoreSource
from pdd_runtime.testing.tcp_proxy import TcpProxy

HOST = "127.0.0.1"
BLOCK = LAYOUT.block_bytes

Party = Callable[..., Transport]


class TransportFixtures:
    """The transports of workers, and what the suite must know of them."""

    plugin: ClassVar[type[Transport]]
    tcp: ClassVar[bool] = True
    """Its endpoints are `host:port`, and a fetch is made over TCP connections to it: so it can be cut there."""
    in_band: ClassVar[bool] = True
    """Blocks cross these connections. Where not, only what the two sides say to one another does."""
    emulates: ClassVar[bool] = True
    """It sends at the pace of an emulated line, where the context has one."""

    patience: ClassVar[float] = 20.0
    """Seconds after which a fetch counts as hung."""

    @pytest.fixture
    def config(self) -> BaseModel:
        return self.plugin.Config.model_validate({})

    def tls(self, cluster: str) -> Tls | None:
        """The certificate of a worker of `cluster`, of the graph `test`; None: there is no TLS."""
        return None

    @pytest_asyncio.fixture
    async def party(self, config: BaseModel) -> AsyncGenerator[Party, None]:
        """Makes the transports of workers; closes them at the end, and holds that nothing of them is left."""
        await asyncio.to_thread(lambda: None)
        before = left()
        async with AsyncExitStack() as stack:

            def make(cluster: str, lines: dict[str, Line] | None = None) -> Transport:
                context = Context(cluster, lines, tls=self.tls(cluster))
                transport = self.plugin(config, context)
                stack.push_async_callback(transport.close)
                serve = transport.serve

                async def at_home(source: StoreSource, host: str) -> str:
                    context.memory = source.store.buffer()
                    return await serve(source, host)

                transport.serve = at_home  # type: ignore[method-assign, assignment]
                return transport

            yield make
        await self._until(
            lambda: no_more(before), lambda: f"a closed transport leaves {left()}, and there were {before}"
        )

    async def _served(self, sender: Transport, source: StoreSource) -> str:
        """An endpoint for a `TcpProxy` to lead to."""
        if not self.tcp:
            pytest.skip("the transport has no TCP connections that a proxy could stand in")
        endpoint = await sender.serve(source, HOST)
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            pytest.skip(f"its endpoint {endpoint} is no host:port; say so with `tcp = False`")
        return endpoint

    async def _until(self, true: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        """Wait for what the end of threads brings about: it has no event of its own."""
        until = now() + self.patience
        while not true():
            assert now() < until, otherwise()
            await asyncio.sleep(0.02)

    @staticmethod
    def _came_through(proxy: TcpProxy) -> None:
        if not proxy.count:
            pytest.skip("the fetch made no TCP connection to the endpoint; say so with `tcp = False`")


def left() -> dict[str, int]:
    """Threads and sockets of this process. Those of the event loop's pool stay, and are not counted."""
    threads = [each for each in threading.enumerate() if not each.name.startswith("asyncio_")]
    descriptors = Path("/proc/self/fd")
    sockets = sum(path.is_socket() for path in descriptors.iterdir()) if descriptors.is_dir() else 0
    return {"threads": len(threads), "sockets": sockets}


def no_more(than: dict[str, int]) -> bool:
    """But for what ten fetches at once may happen to need: a leak is of every fetch, or of every cancelled one."""
    gc.collect()
    return all(count <= than[what] + 10 for what, count in left().items())
