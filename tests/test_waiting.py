"""Tasks that nobody waits for."""

from __future__ import annotations

import asyncio

import pytest

from pdd_runtime.waiting import watched


async def test_one_that_fails_is_told_of_at_once_with_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise RuntimeError("broken")

    task = watched(asyncio.create_task(broken()), "nobody looks any more")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.getMessage() == "nobody looks any more"
    assert "RuntimeError: broken" in caplog.text


async def test_one_that_ends_or_is_cancelled_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [watched(asyncio.create_task(asyncio.sleep(seconds)), "lost") for seconds in (0, 3600)]
    await tasks[0]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert caplog.records == []
