"""Promises of the KV agent: what it fetches is right, what it takes goes back."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from pdd_runtime.errors import CapacityError, DeadlineExceeded, LayoutError, TransferError
from pdd_runtime.kv import chain
from pdd_runtime.plugins.messages import Fetched, Fetching, FetchProgress
from pdd_runtime.worker import agent
from tests.waiting import until

TOKENS = tuple(range(100, 126))
"""Six blocks of four, and a partial one of two."""


def fetched(events: list[Any]) -> Fetched:
    assert isinstance(events[-1], Fetched)
    return events[-1]


async def test_blocks_come_whole_and_are_held_until_the_stream_is_closed(pair: Any) -> None:
    pair.there.publish(TOKENS)
    async with pair.fetching(TOKENS) as events:
        assert events[0] == Fetching(blocks_cached=0, blocks_wanted=7)
        assert fetched(events).cached_tokens == len(TOKENS)
        assert fetched(events).report.blocks == 7
        assert pair.here.bytes_right(TOKENS)
        assert pair.here.store.stats.used == 7
        pair.here.store.reset_cache()
        assert pair.here.cached(TOKENS) == len(TOKENS)
    await pair.unused()
    assert pair.here.cached(TOKENS) == len(TOKENS)


async def test_blocks_come_while_the_request_still_makes_them(pair: Any) -> None:
    with pair.there.activity.publishing("r"):
        fetch = asyncio.create_task(pair.bring(TOKENS))
        for index in range(7):
            await until(lambda: pair.there.source.feeds == 1)
            pair.there.publish(TOKENS, index, index + 1)
            await until(lambda count=index + 1: len(list(pair.here.store.names())) == count)
        assert await fetch == len(TOKENS)
    await pair.unused()


async def test_what_is_here_is_not_moved_again(pair: Any) -> None:
    pair.there.publish(TOKENS)
    async with pair.fetching(TOKENS[:16]):
        pass
    async with pair.fetching(TOKENS) as events:
        assert events[0] == Fetching(blocks_cached=4, blocks_wanted=3)
        assert fetched(events).report.blocks == 3
    async with pair.fetching(TOKENS) as events:
        assert events == [Fetching(7, 0), events[-1]]
        assert fetched(events).report.bytes == 0
        assert fetched(events).cached_tokens == len(TOKENS)
    assert pair.transport.moved == 7
    await pair.unused()


async def test_blocks_out_of_order_are_committed_in_the_order_of_the_chain(pair: Any) -> None:
    pair.there.publish(TOKENS)
    order: list[bytes] = []
    pair.here.store.watch(lambda name, added: order.append(name))
    pair.transport.shuffle = random.Random(3)
    async with pair.fetching(TOKENS) as events:
        assert fetched(events).cached_tokens == len(TOKENS)
    assert order == [block.name for block in chain(pair.here.root, TOKENS, 4)]
    assert pair.here.bytes_right(TOKENS)
    await pair.unused()


async def test_blocks_that_never_come_leave_the_part_before_them(pair: Any) -> None:
    with pair.there.activity.publishing("r"):
        pair.there.publish(TOKENS, 0, 3)
    async with pair.fetching(TOKENS) as events:
        assert fetched(events).cached_tokens == 12
        assert fetched(events).report.gone == 4
        assert pair.here.store.stats.used == 3
    await pair.unused()


async def test_the_end_of_a_request_ends_the_wait_for_its_blocks(pair: Any) -> None:
    with pair.there.activity.publishing("r") as published:
        pair.there.publish(TOKENS, 0, 2)
        fetch = asyncio.create_task(pair.bring(TOKENS))
        await until(lambda: len(list(pair.here.store.names())) == 2)
        assert not fetch.done()
        # A held stream stays open after it has published its last block.
        published()
        assert await fetch == 8
    await pair.unused()


async def test_a_request_that_never_comes_is_waited_for_only_so_long(pair: Any, make_side: Any) -> None:
    there = make_side(grace=0.1, layout=pair.there.info.layout)
    await pair.transport.serve(there.source, "")
    begun = asyncio.get_running_loop().time()
    async with pair.fetching(TOKENS) as events:
        assert fetched(events).cached_tokens == 0
    assert asyncio.get_running_loop().time() - begun >= 0.1
    await there.unused()


async def test_a_request_that_comes_late_is_fed(pair: Any) -> None:
    fetch = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: pair.there.source.feeds == 1)
    with pair.there.activity.publishing("r"):
        pair.there.publish(TOKENS)
    assert await fetch == len(TOKENS)


async def test_progress_is_told_now_and_then(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.gated = True
    seen: list[FetchProgress] = []

    async def read() -> None:
        async with aclosing(pair.here.agent.fetch(pair.request(TOKENS), pair.transport)) as events:
            async for event in events:
                if isinstance(event, FetchProgress):
                    seen.append(event)
                elif isinstance(event, Fetched):
                    return

    reader = asyncio.create_task(read())
    for blocks in range(1, 7):
        pair.transport.gate.release()
        await until(lambda blocks=blocks: bool(seen) and seen[-1].blocks == blocks)
    pair.transport.gate.release()
    await reader
    assert [event.blocks for event in seen][:6] == [1, 2, 3, 4, 5, 6]
    await pair.unused()


async def test_progress_is_not_told_of_every_block(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "PROGRESS_PERIOD", 3600)
    pair.there.publish(TOKENS)
    async with pair.fetching(TOKENS) as events:
        assert sum(isinstance(event, FetchProgress) for event in events) <= 1
    await pair.unused()


# Room


async def test_a_fetch_waits_for_room(pair: Any) -> None:
    pair.there.publish(TOKENS)
    taken = pair.here.store.allocate(28)
    fetch = asyncio.create_task(pair.bring(TOKENS))
    await asyncio.sleep(0.05)
    assert pair.transport.fetches == 0
    pair.here.store.release(taken[:3])
    assert await fetch == len(TOKENS)
    pair.here.store.release(taken[3:])
    await pair.unused()


async def test_no_room_in_time_is_a_capacity_error(pair: Any) -> None:
    taken = pair.here.store.allocate(28)
    with pytest.raises(CapacityError, match="no room for 7 blocks of KV came"):
        async with pair.fetching(TOKENS, timeout=0.1):
            pass
    pair.here.store.release(taken)
    await pair.unused()


async def test_more_than_the_worker_has_is_refused_at_once(pair: Any) -> None:
    with pytest.raises(CapacityError, match="in all"):
        async with pair.fetching(range(200)):
            pass
    await pair.unused()


# Two at once


async def test_two_fetches_of_the_same_blocks_move_them_once(pair: Any) -> None:
    pair.there.publish(TOKENS)
    longer = (*TOKENS[:24], 7, 8, 9, 10, 11)
    pair.there.publish(longer, 6)
    pair.transport.gated = True
    first = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: pair.transport.fetches == 1)
    second = asyncio.create_task(pair.bring(longer, "s"))
    await asyncio.sleep(0.02)
    assert pair.transport.fetches == 1
    pair.transport.gate.release(20)
    assert await first == len(TOKENS)
    assert await second == len(longer)
    assert pair.transport.moved == 9
    assert pair.here.bytes_right(longer)
    await pair.unused()


async def test_the_second_takes_over_when_the_first_is_closed(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.gated = True
    first = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: pair.transport.fetches == 1)
    second = asyncio.create_task(pair.bring(TOKENS, "s"))
    pair.transport.gate.release(2)
    await until(lambda: len(list(pair.here.store.names())) == 2)
    first.cancel()
    await until(lambda: pair.transport.fetches == 2)
    pair.transport.gate.release(20)
    assert await second == len(TOKENS)
    assert pair.here.bytes_right(TOKENS)
    await pair.unused()


async def test_the_second_takes_over_when_the_first_fails(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.gated = True
    pair.transport.break_after = 3
    first = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: pair.transport.fetches == 1)
    second = asyncio.create_task(pair.bring(TOKENS, "s"))
    pair.transport.gate.release(3)
    await until(lambda: len(list(pair.here.store.names())) == 3)
    pair.transport.gate.release(1)
    with pytest.raises(TransferError, match="the line broke"):
        await first
    await until(lambda: pair.transport.fetches == 2)
    pair.transport.break_after = None
    pair.transport.gate.release(20)
    assert await second == len(TOKENS)
    assert pair.transport.moved == 7
    await pair.unused()


async def test_a_block_that_the_engine_made_meanwhile_is_used(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.gated = True
    fetch = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: pair.transport.fetches == 1)
    pair.here.publish(TOKENS, 0, 3)
    pair.transport.gate.release(20)
    assert await fetch == len(TOKENS)
    await pair.unused()
    assert pair.here.store.stats.cached == 7


# Failures


@pytest.mark.parametrize("moved", [0, 3])
async def test_a_broken_transfer_keeps_what_came(pair: Any, moved: int) -> None:
    pair.there.publish(TOKENS)
    pair.transport.break_after = moved
    with pytest.raises(TransferError, match="the line broke"):
        async with pair.fetching(TOKENS):
            pass
    await pair.unused()
    assert pair.here.cached(TOKENS) == 4 * moved


async def test_a_crash_in_a_transport_is_a_transfer_error(pair: Any) -> None:
    pair.transport.crash = True
    with pytest.raises(TransferError, match="transport loopback crashed: KeyError"):
        async with pair.fetching(TOKENS):
            pass
    await pair.unused()


async def test_another_epoch_is_refused(pair: Any) -> None:
    with pytest.raises(TransferError, match="the worker of epoch e0 is gone"):
        await drain(pair.here.agent.fetch(pair.request(TOKENS, epoch="e0"), pair.transport))
    await pair.unused()


async def test_another_model_is_refused(pair: Any, make_side: Any) -> None:
    await pair.transport.serve(make_side(fingerprint="other").source, "")
    with pytest.raises(TransferError, match="different models: model != other"):
        async with pair.fetching(TOKENS):
            pass


async def test_another_layout_than_it_was_told_is_refused(pair: Any, make_side: Any) -> None:
    layout = msgspec.structs.replace(pair.there.info.layout, rope="none")
    await pair.transport.serve(make_side(layout=layout).source, "")
    with pytest.raises(LayoutError, match="rope: half != none") as refused:
        async with pair.fetching(TOKENS):
            pass
    assert str(layout) in refused.value.why
    assert str(pair.there.info.layout) in refused.value.why


async def test_a_deadline_ends_a_fetch(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.gated = True
    with pytest.raises((DeadlineExceeded, TransferError)):
        async with pair.fetching(TOKENS, timeout=0.1):
            pass
    await pair.unused()


async def test_a_draining_agent_refuses_new_fetches(pair: Any) -> None:
    pair.here.agent.refuse("worker main/0 is draining")
    with pytest.raises(TransferError, match="main/0 is draining"):
        async with pair.fetching(TOKENS):
            pass


async def drain(events: Any) -> None:
    async with aclosing(events):
        async for _ in events:
            pass


# Cancellation


async def test_a_cancelled_transfer_keeps_its_memory_until_it_has_ended(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.gated, pair.transport.linger = True, threading.Event()
    fetch = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: pair.transport.fetches == 1)
    fetch.cancel()
    await until(pair.transport.lingering.is_set)
    # Cancelled again, as a lost connection does it, while the transport still writes.
    fetch.cancel()
    await asyncio.sleep(0.05)
    assert pair.here.store.stats.used == 7
    with pytest.raises(CapacityError):
        pair.here.store.allocate(26)
    pair.transport.linger.set()
    await pair.unused()


@pytest.mark.parametrize("wait_for_room", [False, True])
async def test_fetches_closed_at_random_moments_leave_nothing(pair: Any, wait_for_room: bool) -> None:
    taken = pair.here.store.allocate(27) if wait_for_room else []
    await pair.close_at_random(random.Random(11), rounds=25, longest=20)
    pair.here.store.release(taken)
    await pair.unused()


async def test_closing_the_agent_ends_fetches_and_feeds(pair: Any) -> None:
    pair.there.publish(TOKENS, 0, 2)
    fetch = asyncio.create_task(pair.bring(TOKENS))
    await until(lambda: len(list(pair.here.store.names())) == 2)
    await pair.there.agent.close()
    with pytest.raises(Exception, match="closed"):
        await fetch
    await pair.unused()
