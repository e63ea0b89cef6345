"""What a worker measures of its own work, and tells each of those that watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdd_runtime.plugins.engine import DecodeEvent, DecodeRequest, Sampling
from pdd_runtime.plugins.messages import Empty, WatchEvent
from pdd_runtime.rpc import Greeting, connect
from pdd_runtime.worker import work as module
from pdd_runtime.worker.work import Work
from tests.waiting import until

TOKENS = tuple(range(40, 90))


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "now", clock)
    return clock


@contextmanager
def prefilled(work: Work, tokens: int) -> Iterator[None]:
    with work.prefill("a") as prompt:
        yield
        prompt.tokens = tokens


def test_nothing_is_known_before_anything_has_ended(clock: Clock) -> None:
    work = Work()
    with work.prefill("a"):
        clock.at += 5.0
        assert (work.token_time, work.request_time) == (None, None)


def test_prompts_one_after_another_and_the_time_between_them_is_nobodys(clock: Clock) -> None:
    work = Work()
    for tokens, seconds in ((100, 1.0), (300, 3.0)):
        with prefilled(work, tokens):
            clock.at += seconds
        clock.at += 60.0
    assert work.token_time == pytest.approx(0.01)
    assert work.request_time == pytest.approx(2.0)


def test_prompts_side_by_side_share_the_time(clock: Clock) -> None:
    work = Work()
    with prefilled(work, 100), prefilled(work, 100):
        clock.at += 2.0
    assert work.request_time == pytest.approx(1.0)
    assert work.token_time == pytest.approx(0.01)


def test_a_prompt_that_is_cached_teaches_nothing_of_tokens(clock: Clock) -> None:
    work = Work()
    with prefilled(work, 0):
        clock.at += 0.01
    assert work.token_time is None
    assert work.request_time == pytest.approx(0.01)


def test_answers_of_one_batch_have_a_share_each_and_who_waits_for_a_place_has_none(clock: Clock) -> None:
    work = Work()
    work.limit = 4
    with work.decode("a"):
        clock.at += 8.0
    assert work.request_time == pytest.approx(2.0)
    crowded = Work()
    crowded.limit = 2
    with crowded.decode("a"), crowded.decode("a"), crowded.decode("a"), crowded.decode("a"):
        clock.at += 8.0
    assert crowded.request_time == pytest.approx(2.0)


def test_what_was_measured_long_ago_counts_less_and_less(clock: Clock) -> None:
    work = Work()

    def some(seconds: float) -> None:
        for _ in range(4 * module.WINDOW):
            with prefilled(work, 100):
                clock.at += seconds

    some(1.0)
    some(0.1)
    assert work.request_time is not None
    assert 0.1 < work.request_time < 0.2
    some(1.0)
    assert work.request_time > 0.9


async def test_who_watches_a_worker_is_told_of_its_own_requests(cluster: Any) -> None:
    worker = await cluster.start("main", "spec.pools.main.engine.config.token_time=0.05")
    address = (await worker.state("ready")).endpoint
    secret = cluster.server.greeting.secret
    connections = [
        await connect(address, Greeting(graph="tested", secret=secret, cluster="dc-a", name="frontend/0", epoch=epoch))
        for epoch in ("one", "two")
    ]
    heard: dict[int, WatchEvent] = {}

    async def watch(index: int) -> None:
        async for event in connections[index].stream("worker.watch", Empty(), WatchEvent, timeout=None):
            heard[index] = event

    def shown(*yours: int) -> bool:
        return len(heard) == 2 and all(
            (heard[index].yours, heard[index].load.running) == (own, sum(yours)) for index, own in enumerate(yours)
        )

    watching = [asyncio.create_task(watch(index)) for index in (0, 1)]
    await until(lambda: shown(0, 0))
    streams = []
    for number, index in enumerate((0, 0, 1)):
        request = DecodeRequest(
            id=f"r{number}", tokens=TOKENS, prompt_tokens=50, max_tokens=4000, sampling=Sampling(temperature=0)
        )
        streams.append(connections[index].stream("engine.decode", request, DecodeEvent, timeout=None))
        await anext(streams[-1])
    await until(lambda: shown(2, 1))
    await streams[0].aclose()
    await until(lambda: shown(1, 1))
    assert heard[0].load.request_time is not None
    await connections[0].close()
    await until(lambda: heard[1].load.running == heard[1].yours == 1)
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
    await connections[1].close()
