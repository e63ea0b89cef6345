"""Promises to those who watch a worker."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from pdd_runtime.kv import chain
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.messages import WatchEvent
from pdd_runtime.plugins.transport import LinkTelemetry
from pdd_runtime.worker import watch
from pdd_runtime.worker.farewell import Farewell
from pdd_runtime.worker.watch import StoreWatch
from tests.waiting import PATIENCE

TOKENS = tuple(range(100, 120))


def names(side: Any) -> list[bytes]:
    return [block.name for block in chain(side.root, TOKENS, 4)]


class Watched:
    """A side whose load a test can change."""

    def __init__(self, side: Any) -> None:
        self.side, self.now = side, Load()
        self.links: tuple[LinkTelemetry, ...] = ()
        self.events = StoreWatch(side.store, side.activity, self.load, lambda: self.links, Farewell()).events()

    async def load(self) -> Load:
        return self.now

    async def next(self, timeout: float = PATIENCE) -> WatchEvent:
        async with asyncio.timeout(timeout):
            return await anext(self.events)


async def test_all_names_first_then_changes_together(make_side: Any) -> None:
    watched = Watched(make_side())
    side = watched.side
    side.publish(TOKENS, 0, 2)
    async with aclosing(watched.events):
        assert await watched.next() == WatchEvent(added=tuple(names(side)[:2]), load=Load())
        side.publish(TOKENS, 2)
        assert await watched.next() == WatchEvent(added=tuple(names(side)[2:]), load=Load())
        side.store.reset_cache()
        event = await watched.next()
        assert sorted(event.removed) == sorted(names(side))
        assert event.added == ()


async def test_what_comes_and_goes_between_two_events_is_not_told(make_side: Any) -> None:
    watched = Watched(make_side())
    side = watched.side
    async with aclosing(watched.events):
        assert (await watched.next()).added == ()
        side.publish(TOKENS)
        side.store.reset_cache()
        side.publish(TOKENS, 0, 1)
        assert (await watched.next()).added == tuple(names(side)[:1])
        side.store.reset_cache()
        side.publish(TOKENS, 0, 1)
        with pytest.raises(TimeoutError):
            await watched.next(0.1)


async def test_a_change_of_load_alone_is_told(make_side: Any) -> None:
    watched = Watched(make_side())
    async with aclosing(watched.events):
        await watched.next()
        watched.now = Load(running=1)
        assert (await watched.next()).load.running == 1


async def test_a_request_that_begins_does_not_wait_for_the_next_look_at_the_load(
    make_side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOAD_PERIOD", 3600)
    watched = Watched(make_side())
    async with aclosing(watched.events):
        await watched.next()
        watched.now = Load(running=1)
        with watched.side.activity.publishing("r"):
            assert (await watched.next()).load.running == 1


async def test_events_are_not_too_many(make_side: Any) -> None:
    watched = Watched(make_side(blocks=256))
    side = watched.side
    async with aclosing(watched.events):
        await watched.next()
        begun = asyncio.get_running_loop().time()
        for _ in range(3):
            side.publish(TOKENS)
            await watched.next()
            side.store.reset_cache()
            await watched.next()
        assert asyncio.get_running_loop().time() - begun >= 5 * watch.PERIOD


async def test_many_names_come_in_pieces(make_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "NAMES", 2)
    watched = Watched(make_side())
    watched.side.publish(TOKENS)
    async with aclosing(watched.events):
        assert [len((await watched.next()).added) for _ in range(3)] == [2, 2, 1]


async def test_a_watcher_that_leaves_is_forgotten(make_side: Any) -> None:
    watched = Watched(make_side())
    async with aclosing(watched.events):
        await watched.next()
    assert len(watched.side.store._watchers) == 1, "the source's own"


async def test_what_a_transport_has_seen_of_a_link_is_told_when_it_changes(make_side: Any) -> None:
    watched = Watched(make_side())
    async with aclosing(watched.events):
        assert (await watched.next()).links == ()
        watched.links = (LinkTelemetry(cluster="dc-b", goodput=25e6, rtt=0.05, queue=1 << 20),)
        assert await watched.next() == WatchEvent(load=Load(), links=watched.links)
