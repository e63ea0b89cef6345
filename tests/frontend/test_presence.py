"""What discovery has of a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from pdd_runtime.discovery import RegistryServer
from pdd_runtime.discovery.local import LocalConfig, LocalDiscovery
from pdd_runtime.errors import ConnectionLost
from pdd_runtime.frontend.presence import Presence
from pdd_runtime.pipeline.decisions import Journal
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.rpc import Greeting, RpcServer
from tests.frontend.test_bulletin import Front
from tests.waiting import until


class Losing(LocalDiscovery):
    """It loses a message to the registry where it is told to, and sends it again, as all do."""

    lose = False
    sent = 0

    async def renew(self, member: Member) -> None:
        if self.lose:
            self.lose = False
            raise ConnectionLost("the message was lost")
        await super().renew(member)
        self.sent += 1


@pytest.fixture
async def registry() -> AsyncIterator[tuple[RegistryServer, Losing]]:
    server = RpcServer(Greeting(graph="", secret="s", cluster="", name="launcher"))
    registry = RegistryServer(server)
    discovery = Losing(LocalConfig(), await server.start("127.0.0.1"), "s")
    yield registry, discovery
    await discovery.close()
    registry.close()
    await server.close()


async def test_what_was_said_last_stands_though_what_was_said_before_was_lost_on_the_way(
    registry: tuple[RegistryServer, Losing],
) -> None:
    there, discovery = registry
    front = Front(0, Journal())
    presence = Presence(discovery, front.shown(), front.bulletin)
    await presence.show("starting")
    keeping = asyncio.create_task(presence.keep())
    try:
        discovery.lose = True
        front.decide("promote", "b")
        await until(lambda: not discovery.lose)
        await presence.show("ready")
        await until(lambda: discovery.sent == 3)
        (member,) = there.members()
        assert (member.state, member.bulletin) == ("ready", front.bulletin.text())
        assert member == presence.member
        # Whatever is decided later is told, too.
        front.decide("abort", "c")
        await until(lambda: there.members()[0].bulletin == front.bulletin.text())
    finally:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
    await presence.leave()
    assert there.members() == ()
