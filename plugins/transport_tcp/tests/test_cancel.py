"""A fetch that is given up leaves nothing behind, on either side."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

import msgspec
import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from plugins.transport_tcp.tests.counting import Party

LARGE = msgspec.structs.replace(LAYOUT, layers=32)


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_while_blocks_are_waited_for_reaches_the_sender(party: Party) -> None:
    source, wanted = StoreSource(), sequence(4)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted)))
    await asyncio.to_thread(source.wait_for_feeds, 1)
    begun = now()
    await cancel(transfer)
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert now() - begun < 5


async def test_cancelling_frees_pins_of_blocks_that_cannot_leave(party: Party) -> None:
    source, wanted = StoreSource(LARGE), sequence(40, LARGE)
    source.make(wanted)
    loop, first = asyncio.get_running_loop(), asyncio.Event()
    sink = StoreSink(wanted, LARGE, on_done=lambda index: loop.call_soon_threadsafe(first.set))
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    async with TcpProxy(endpoint, *[Fault("freeze", LARGE.block_bytes * 3 // 2)] * 4) as proxy:
        transfer = asyncio.create_task(party("dc-b").fetch(proxy.endpoint, subscription(wanted, layout=LARGE), sink))
        await first.wait()
        await cancel(transfer)
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0


async def test_cancelling_while_connecting_ends_at_once(party: Party) -> None:
    """A listener whose queue is full answers no further connection."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        host, port = listener.getsockname()
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((host, port))
        wanted = sequence(1)
        transfer = asyncio.create_task(party("dc-b").fetch(f"{host}:{port}", subscription(wanted), StoreSink(wanted)))
        await asyncio.sleep(0.2)
        begun = now()
        await cancel(transfer)
        assert now() - begun < 3, "less than connecting may take"


async def test_cancelling_before_the_thread_runs_ends_at_once(party: Party) -> None:
    source, wanted = StoreSource(), sequence(1)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    receiver = party("dc-b")
    for _ in range(50):
        transfer = asyncio.create_task(receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted)))
        await asyncio.sleep(0)
        await cancel(transfer)
    await asyncio.to_thread(source.wait_for_feeds, 0)


async def test_closing_a_transport_ends_its_fetches(party: Party) -> None:
    source, wanted = StoreSource(), sequence(4)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    receiver = party("dc-b")
    transfer = asyncio.create_task(receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted)))
    await asyncio.to_thread(source.wait_for_feeds, 1)
    await receiver.close()
    with pytest.raises(TransferError, match="transport was closed"):
        await transfer
    with pytest.raises(TransferError, match="transport is closed"):
        await receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted))


async def test_200_fetches_with_a_third_cancelled_leave_nothing(party: Party) -> None:
    """The fixture holds that no thread and no socket is left."""
    chance = random.Random(0)
    source, wanted = StoreSource(), sequence(8)
    source.make(wanted[:6])
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    receiver = party("dc-b")

    async def one(number: int) -> None:
        sink = StoreSink(wanted)
        transfer = asyncio.create_task(receiver.fetch(endpoint, subscription(wanted, request_id=f"req-{number}"), sink))
        if number % 3 == 0:
            await asyncio.sleep(chance.random() * 0.05)
            transfer.cancel()
        await asyncio.wait([transfer])
        assert transfer.cancelled() or sink.whole

    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(one(number))
            if number == 100:
                source.make(wanted[6:])
            if number % 10 == 0:
                await asyncio.sleep(0.01)
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0
