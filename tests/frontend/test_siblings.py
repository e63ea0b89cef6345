"""What frontend processes tell each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import cast

import msgspec
import pytest

from pdd_runtime.errors import LaunchError
from pdd_runtime.frontend import siblings as module
from pdd_runtime.frontend.keys import Key
from pdd_runtime.frontend.limits import Ledger
from pdd_runtime.frontend.service import Service
from pdd_runtime.frontend.siblings import Siblings
from pdd_runtime.pipeline.decisions import Journal
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcServer
from tests.frontend.test_bulletin import Front
from tests.waiting import PATIENCE, until


class Known:
    """A discovery that has found all there will be."""

    across_hosts = True

    def __init__(self, *members: Member) -> None:
        self.members = members

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        yield self.members
        await asyncio.Event().wait()


class Broken(Known):
    """One that has a fault of its own."""

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        yield self.members
        raise RuntimeError("a fault of its own")


class Refusing(Known):
    """One whose servers refuse whoever asks."""

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        raise LaunchError("you may not", why="you are nobody", fix="be somebody")
        yield self.members


async def test_what_a_key_uses_at_one_counts_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE_EVERY", 0.02)
    greeting = Greeting(graph="g", secret="s", cluster="dc", name="frontend")
    planes = [RpcServer(greeting) for _ in range(3)]
    ends = [await plane.start("127.0.0.1") for plane in planes]
    members = [
        Member(
            key=WorkerKey("frontend", index, f"epoch-{index}"),
            role="frontend",
            cluster="dc",
            state="ready",
            pid=1,
            endpoint="",
            plane=end,
        )
        for index, end in enumerate(ends)
    ]
    all_of_them = [Siblings(cast(Service, None), member.key) for member in members]
    ledgers, tasks = [Ledger() for _ in members], []
    key = Key(name="a", sha256="", requests=2)
    try:
        for each, plane, ledger in zip(all_of_them, planes, ledgers, strict=True):
            await each.start(cast(Discovery, Known(*members)), greeting, plane)
            tasks.append(asyncio.create_task(each.share(ledger)))
        for ledger in ledgers[:2]:
            ledger.account("a").begin(key)
        await until(lambda: [ledger.account("a").elsewhere for ledger in ledgers] == [1, 1, 2])
        ledgers[0].account("a").end(5)
        await until(lambda: [ledger.account("a").elsewhere for ledger in ledgers] == [1, 0, 1])
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for each in all_of_them:
            await each.close()
        for plane in planes:
            await plane.close()


async def test_of_decisions_only_those_of_other_launchers_may_be_behind() -> None:
    greeting = Greeting(graph="doors", secret="s", cluster="dc-a", name="frontend")
    plane = RpcServer(greeting)
    end = await plane.start("127.0.0.1")
    fronts = [Front(index, Journal()) for index in range(3)]
    clusters = ("dc-a", "dc-a", "dc-b")
    members = [
        msgspec.structs.replace(front.shown(), cluster=cluster, plane=end)
        for front, cluster in zip(fronts, clusters, strict=True)
    ]
    siblings = Siblings(cast(Service, None), fronts[0].key, bulletin=fronts[0].bulletin)
    try:
        await siblings.start(cast(Discovery, Known(*members)), greeting, plane)
        assert await siblings.serving()
        fronts[0].decide("promote", "b")
        # The one of its own launcher is asked itself, and reads the same file.
        assert siblings.behind == [fronts[2].key]
    finally:
        await siblings.close()
        await plane.close()


async def test_who_can_never_know_its_siblings_is_told_instead_of_waiting_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    greeting = Greeting(graph="g", secret="s", cluster="dc", name="frontend")
    plane = RpcServer(greeting)
    siblings = Siblings(cast(Service, None), WorkerKey("frontend", 0, "e"))
    try:
        await siblings.start(cast(Discovery, Refusing()), greeting, plane)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(LaunchError, match="you may not"):
                await siblings.serving()
    finally:
        await siblings.close()
        await plane.close()
    assert "fix: be somebody" in caplog.text


async def test_a_fault_after_which_siblings_are_seen_no_more_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    greeting = Greeting(graph="g", secret="s", cluster="dc", name="frontend")
    plane = RpcServer(greeting)
    siblings = Siblings(cast(Service, None), WorkerKey("frontend", 0, "e"))
    try:
        await siblings.start(cast(Discovery, Broken()), greeting, plane)
        await until(lambda: "other frontends that come and go are not seen any more" in caplog.text)
        assert not await siblings.serving()
    finally:
        await siblings.close()
        await plane.close()
    assert "RuntimeError: a fault of its own" in caplog.text
