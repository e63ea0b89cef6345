"""Promises of a race between coroutines."""

from __future__ import annotations

import asyncio

import pytest

from pdd_runtime.worker.lifetime import race


async def test_the_first_to_end_cancels_the_others() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    assert await race(slow(), asyncio.sleep(0.01), slow()) == 1
    assert ended == ["slow", "slow"]


async def test_what_the_first_raises_is_raised() -> None:
    async def broken() -> None:
        await asyncio.sleep(0)
        raise KeyError("broken")

    with pytest.raises(KeyError):
        await race(asyncio.sleep(60), broken())


async def test_a_cancelled_race_cancels_all() -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    racing = asyncio.create_task(race(slow()))
    await asyncio.sleep(0.01)
    racing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await racing
    assert ended.is_set()
