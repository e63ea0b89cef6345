"""Promises of the wait for room."""

from __future__ import annotations

import asyncio

import pytest

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import KvLayout
from pdd_runtime.worker.store import WorkerStore

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_size=4)


async def test_those_who_wait_are_served_in_order() -> None:
    store = WorkerStore(LAYOUT, 8)
    taken = store.allocate(7)
    big = asyncio.create_task(store.room(3))
    small = asyncio.create_task(store.room(1))
    await asyncio.sleep(0)
    # One block is free, but the first in the queue needs three.
    assert not small.done()
    store.release(taken[:2])
    assert len(await big) == 3
    assert not small.done()
    store.release(taken[2:3])
    assert len(await small) == 1


async def test_whoever_stops_waiting_lets_the_next_one_in() -> None:
    store = WorkerStore(LAYOUT, 8)
    store.allocate(7)
    big = asyncio.create_task(store.room(3))
    small = asyncio.create_task(store.room(1))
    await asyncio.sleep(0)
    big.cancel()
    assert len(await small) == 1
    assert store.stats.used == 8


async def test_a_wait_cancelled_just_when_it_is_served_leaves_nothing() -> None:
    store = WorkerStore(LAYOUT, 8)
    taken = store.allocate(8)
    waiting = asyncio.create_task(store.room(3))
    await asyncio.sleep(0)
    store.release(taken)
    asyncio.get_running_loop().call_soon(waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert store.stats.used == 0


async def test_what_can_never_fit_is_refused_at_once() -> None:
    with pytest.raises(CapacityError, match="the worker has 8 in all"):
        await WorkerStore(LAYOUT, 8).room(9)
