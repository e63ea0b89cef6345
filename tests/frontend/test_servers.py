"""The HTTP servers of a frontend process, and what it does without them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from pdd_runtime.discovery import LocalDiscovery, RegistryServer
from pdd_runtime.discovery.local import LocalConfig
from pdd_runtime.frontend.__main__ import _serve
from pdd_runtime.frontend.presence import Presence
from pdd_runtime.frontend.server import listen
from pdd_runtime.frontend.servers import Servers
from pdd_runtime.frontend.service import Service
from pdd_runtime.frontend.siblings import Siblings
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver
from pdd_runtime.pipeline.decisions import Journal
from pdd_runtime.rpc import Greeting, RpcServer
from pdd_runtime.worker.lifetime import Lifetime
from tests.frontend.conftest import GivenDriver
from tests.frontend.test_bulletin import Front, graph
from tests.waiting import PATIENCE


class Endless:
    """A lifetime: nobody tells this process to end."""

    def __init__(self) -> None:
        self.orphaned, self.patience = asyncio.Event(), None

    async def over(self) -> None:
        await asyncio.Event().wait()


async def test_a_frontend_whose_server_has_failed_ends_with_its_reason_instead_of_being_known_as_ready() -> None:
    server = RpcServer(Greeting(graph="", secret="s", cluster="", name="launcher"))
    registry = RegistryServer(server)
    discovery = LocalDiscovery(LocalConfig(), await server.start("127.0.0.1"), "s")
    service = Service(cast(Driver, GivenDriver()), Timelines())
    presence = Presence(discovery, Front(0, Journal()).shown())
    sock = listen("127.0.0.1", 0)
    servers = Servers(service, Siblings(service), None, graph().spec.frontend, sock, None)
    # What it is to listen on is gone.
    sock.close()
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(BaseExceptionGroup):
                await _serve(service, servers, presence, cast(Lifetime, Endless()))
        assert registry.members() == ()
    finally:
        await discovery.close()
        registry.close()
        await server.close()
