"""Promises of a worker that is told to stop: what it has begun ends well, or ends with a word."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from pdd_runtime.errors import Cancelled, EngineError
from pdd_runtime.plugins.engine import DecodeEvent, Extended, PrefillEvent, PrefillRequest, Sampling, Stopped
from pdd_runtime.plugins.messages import Drain, Empty, WatchEvent
from tests.waiting import PATIENCE
from tests.worker.test_lifecycle import PROMPT, decode

SLOW = "spec.pools.main.engine.config.token_time=0.01"
TERM = pytest.mark.parametrize("way", ["SIGTERM", "stdin", "rpc"])


async def tell(worker: Any, way: str, patience: float = PATIENCE) -> asyncio.Task[None] | None:
    """Tell it to stop. By `rpc` it drains and stays; the task is the call."""
    match way:
        case "SIGTERM":
            worker.process.send_signal(signal.SIGTERM)
        case "stdin":
            worker.process.stdin.write(f"drain {patience}\n".encode())
            await worker.process.stdin.drain()
        case "rpc":
            connection = await worker.connect()
            return asyncio.create_task(
                connection.call("worker.drain", Drain(patience), type(None), timeout=2 * PATIENCE)
            )
    return None


async def over(worker: Any, draining: asyncio.Task[None] | None) -> None:
    if draining is not None:
        await draining
        worker.process.stdin.close()
    assert await worker.ended() == 0


@TERM
async def test_who_watches_is_told_and_served_until_it_leaves(cluster: Any, way: str) -> None:
    worker = await cluster.start("main")
    connection = await worker.connect()
    watching = connection.stream("worker.watch", Empty(), WatchEvent, timeout=None)
    assert not (await anext(watching)).draining
    draining = await tell(worker, way)
    async with asyncio.timeout(PATIENCE):
        while not (await anext(watching)).draining:
            pass
    # A session of it had begun elsewhere, and comes here only now: nothing is lost by that.
    prefill = PrefillRequest(id="late", tokens=PROMPT, sampling=Sampling(temperature=0))
    async with connection.stream("engine.prefill", prefill, PrefillEvent, timeout=PATIENCE) as events:
        assert len([event async for event in events]) == 2
    async with connection.stream("engine.decode", decode("late", 20), DecodeEvent, timeout=PATIENCE) as events:
        assert [event async for event in events][-1] == Stopped("length", len(PROMPT) + 20)
    await watching.aclose()
    await over(worker, draining)


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("way", ["stdin", "rpc"])
async def test_what_is_left_when_its_patience_ends_is_cancelled_by_the_worker(
    cluster: Any, way: str, watched: bool
) -> None:
    worker = await cluster.start("main", SLOW)
    connection = await worker.connect()
    if watched:
        await anext(connection.stream("worker.watch", Empty(), WatchEvent, timeout=None))
    streams = [
        connection.stream("engine.decode", decode(f"r{n}", 6_000, hold=n == 1), DecodeEvent, timeout=None)
        for n in range(3)
    ]
    for stream in streams:
        assert isinstance(await anext(stream), Extended)
    draining = await tell(worker, way, 0.2)
    for stream in streams:
        with pytest.raises(Cancelled, match=r"worker main/0 stops"):
            async for _ in stream:
                pass
    if draining is not None:
        with pytest.raises(Cancelled, match="worker main/0 stops"):
            await anext(connection.stream("engine.decode", decode("s"), DecodeEvent, timeout=PATIENCE))
    await over(worker, draining)


async def test_a_held_decode_keeps_a_worker_that_drains(cluster: Any) -> None:
    worker = await cluster.start("main")
    connection = await worker.connect()
    held = connection.stream("engine.decode", decode("r", 1, hold=True), DecodeEvent, timeout=None)
    while not isinstance(await anext(held), Stopped):
        pass
    await tell(worker, "stdin")
    await worker.state("draining")
    with pytest.raises(EngineError, match="draining"):
        await anext(connection.stream("engine.decode", decode("s"), DecodeEvent, timeout=PATIENCE))
    assert worker.process.returncode is None
    await held.aclose()
    await over(worker, None)


async def test_orders_that_are_none_are_passed_over(cluster: Any) -> None:
    worker = await cluster.start("main")
    worker.process.stdin.write(b"x" * 10_000 + b"\ndrains\n\n\xff 1\n")
    await worker.process.stdin.drain()
    await worker.unused()
    worker.process.stdin.write(b"drain soon\n")
    assert await worker.ended() == 0


async def test_a_replacement_takes_its_place_only_when_it_is_ready(cluster: Any) -> None:
    old = await cluster.start("main", SLOW)
    running = (await old.connect()).stream("engine.decode", decode("r", 300), DecodeEvent, timeout=None)
    await anext(running)
    new = await cluster.start("main", index=0, replaces=True, connect=False)
    async with asyncio.timeout(PATIENCE):
        while True:
            version = cluster.registry.version
            (member,) = cluster.registry.members()
            assert member.state == "ready"
            if member.key.epoch == "epoch-1":
                break
            await cluster.registry.changed(version)
    assert new.member.info is not None
    await tell(old, "stdin")
    assert [event async for event in running][-1] == Stopped("length", len(PROMPT) + 300)
    assert await old.ended() == 0
    assert new.member.state == "ready"
    await new.connect()
    await new.unused()
