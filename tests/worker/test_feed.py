"""Promises of a feed to the transport threads that read it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import pytest

from pdd_runtime.errors import Cancelled, DeadlineExceeded, TransferError
from pdd_runtime.kv import chain
from pdd_runtime.plugins.transport import Gone, Ready, Subscription, Wanted
from pdd_runtime.worker.feed import SourceFeed
from tests.waiting import PATIENCE, until

TOKENS = tuple(range(100, 126))


def subscribe(side: Any, deadline: float = PATIENCE, request_id: str = "r", secret: str = "shared") -> SourceFeed:
    blocks = tuple(Wanted(block.name, block.tokens) for block in chain(side.root, TOKENS, 4))
    feed: SourceFeed = side.source.open(
        Subscription(
            request_id=request_id,
            blocks=blocks,
            layout=side.info.layout,
            fingerprint="model",
            epoch="e1",
            cluster="there",
            secret=secret,
            deadline=deadline,
        )
    )
    return feed


async def test_blocks_come_in_the_order_asked_for_and_stay_pinned_until_sent(make_side: Any) -> None:
    side = make_side()
    side.publish(TOKENS)
    feed = subscribe(side)
    outcomes = [await asyncio.to_thread(feed.next, PATIENCE) for _ in range(7)]
    assert [outcome.index for outcome in outcomes if isinstance(outcome, Ready)] == list(range(7))
    assert side.store.stats.used == 7
    feed.sent(2)
    await until(lambda: side.store.stats.used == 6)
    feed.sent(2)
    feed.close()
    feed.close()
    await side.unused()


async def test_a_block_cannot_be_written_through_a_feed(make_side: Any) -> None:
    side = make_side()
    side.publish(TOKENS)
    feed = subscribe(side)
    outcome = await asyncio.to_thread(feed.next, PATIENCE)
    assert isinstance(outcome, Ready)
    assert outcome.memory.readonly
    feed.close()
    await side.unused()


async def test_streams_that_share_a_feed_get_each_block_once(make_side: Any) -> None:
    side = make_side()
    seen: Counter[int] = Counter()
    lock = threading.Lock()

    def stream() -> None:
        while sum(seen.values()) < 7:
            outcome = feed.next(0.01)
            if outcome is not None:
                with lock:
                    seen[outcome.index] += 1
                feed.sent(outcome.index)

    with side.activity.publishing("r"):
        feed = subscribe(side)
        streams = [asyncio.ensure_future(asyncio.to_thread(stream)) for _ in range(4)]
        for index in range(7):
            side.publish(TOKENS, index, index + 1)
            await asyncio.sleep(0.005)
        await asyncio.gather(*streams)
    assert seen == dict.fromkeys(range(7), 1)
    feed.close()
    await side.unused()


async def test_a_wait_that_brings_nothing_ends_in_time(make_side: Any) -> None:
    side = make_side()
    feed = subscribe(side)
    begun = time.monotonic()
    assert await asyncio.to_thread(feed.next, 0.05) is None
    assert time.monotonic() - begun >= 0.05
    feed.close()
    await side.unused()


async def test_the_deadline_ends_a_wait(make_side: Any) -> None:
    side = make_side()
    feed = subscribe(side, deadline=0.05)
    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(feed.next, PATIENCE)
    feed.close()
    await side.unused()


async def test_closing_wakes_those_who_wait(make_side: Any) -> None:
    side = make_side()
    feed = subscribe(side)
    waiting = asyncio.ensure_future(asyncio.to_thread(feed.next, PATIENCE))
    await asyncio.sleep(0.05)
    feed.close()
    with pytest.raises(Cancelled):
        await waiting
    await side.unused()


async def test_a_closing_worker_keeps_the_pins_of_what_is_being_sent(make_side: Any) -> None:
    side = make_side()
    side.publish(TOKENS)
    feed = subscribe(side)
    await asyncio.to_thread(feed.next, PATIENCE)
    await side.agent.close()
    with pytest.raises(Cancelled):
        await asyncio.to_thread(feed.next, PATIENCE)
    assert side.store.stats.used == 7
    feed.close()
    await side.unused()


async def test_evicted_blocks_of_an_ended_request_are_gone(make_side: Any) -> None:
    side = make_side()
    with side.activity.publishing("r"):
        side.publish(TOKENS)
    side.store.reset_cache()
    feed = subscribe(side)
    assert [await asyncio.to_thread(feed.next, PATIENCE) for _ in range(7)] == [Gone(index) for index in range(7)]
    # One that comes after all is not pinned for a feed that has been told it will not.
    side.publish(TOKENS)
    assert side.store.stats.used == 0
    feed.close()
    await side.unused()


async def test_a_stranger_without_the_secret_gets_nothing(make_side: Any) -> None:
    side = make_side()
    side.publish(TOKENS)
    with pytest.raises(TransferError) as told:
        subscribe(side, secret="guessed")
    assert "secret" in told.value.what
    assert "guessed" not in str(told.value)
    assert "shared" not in str(told.value)
    assert side.source.feeds == 0
