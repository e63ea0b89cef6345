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
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from plugins.transport_tcp.tests.counting import Party
from tests.waiting import until

LINKS = {cluster: LinkFacts("wan", 1e9, 0.001, 2) for cluster in ("dc-a", "dc-b")}
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


class DeafProxy:
    """Two ways to a sender; the first forwards nothing that the receiver says once `deaf` is set, until it is `cut`."""

    def __init__(self, target: str) -> None:
        self._target, self._first = target, True
        self.answered: set[asyncio.StreamReader] = set()
        """Connections on which the sender has said something."""
        self.deaf = False
        self.swallowed, self.cut = asyncio.Event(), asyncio.Event()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, self._first = self._first, False
        host, _, port = self._target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ways = [
            asyncio.create_task(self._forward(reader, far_writer, deaf=first)),
            asyncio.create_task(self._answer(far_reader, writer)),
            *([asyncio.create_task(self.cut.wait())] if first else []),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, far_writer):
            end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, deaf: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if deaf and self.deaf:
                    self.swallowed.set()
                else:
                    writer.write(data)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                self.answered.add(reader)


async def test_a_cancellation_that_was_said_on_a_connection_that_is_lost_is_said_again(party: Party) -> None:
    source, wanted = StoreSource(), sequence(4)
    proxy = DeafProxy(await party("dc-a", links=LINKS).serve(source, "127.0.0.1"))
    async with await asyncio.start_server(proxy.connect, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        asked = subscription(wanted, deadline=900.0)
        receiver = party("dc-b", links=LINKS, streams=2)
        transfer = asyncio.create_task(receiver.fetch(f"{host}:{port}", asked, StoreSink(wanted)))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        await until(lambda: len(proxy.answered) == 2)
        proxy.deaf = True
        await cancel(transfer)
        await proxy.swallowed.wait()
        proxy.cut.set()
        await asyncio.to_thread(source.wait_for_feeds, 0)
        await receiver.close()
