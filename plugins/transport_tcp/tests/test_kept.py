"""Connections are opened once, shared by all fetches from one sender, and bounded."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import TcpProxy
from plugins.transport_tcp.tests.counting import Party, sockets, threads
from tests.waiting import until

LARGE = msgspec.structs.replace(LAYOUT, layers=32)
"""Blocks of 256 KiB."""


async def test_fetches_one_after_another_share_one_connection(party: Party) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    receiver = party("dc-b")
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1")) as proxy:
        for number in range(20):
            sink = StoreSink(wanted)
            report = await receiver.fetch(proxy.endpoint, subscription(wanted, request_id=f"req-{number}"), sink)
            assert sink.whole
            assert report.resumed == 0
        assert proxy.count == 1


async def test_large_fetches_open_more_connections_but_never_more_than_said(party: Party) -> None:
    source, wanted = StoreSource(LARGE), sequence(40, LARGE)
    source.make(wanted)
    receiver = party("dc-b", streams=3)
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1")) as proxy, asyncio.TaskGroup() as group:
        for number in range(6):
            asked = subscription(wanted, layout=LARGE, request_id=f"req-{number}")
            group.create_task(receiver.fetch(proxy.endpoint, asked, StoreSink(wanted, LARGE)))
    assert 1 < proxy.count <= 3


async def test_over_a_link_all_connections_are_opened_at_once(party: Party) -> None:
    links = {"dc-a": LinkFacts("wan", 1e9, 0.01, 4), "dc-b": LinkFacts("wan", 1e9, 0.01, 4)}
    source, wanted = StoreSource(), sequence(1)
    endpoint = await party("dc-a", links=links).serve(source, "127.0.0.1")
    async with TcpProxy(endpoint) as proxy, asyncio.TaskGroup() as group:
        group.create_task(party("dc-b", links=links).fetch(proxy.endpoint, subscription(wanted), StoreSink(wanted)))
        await until(lambda: proxy.count == 4)
        source.make(wanted)


async def test_2000_transfers_use_few_sockets_and_threads(party: Party) -> None:
    """100 of them at once; a sender that is asked so often has no connection, port or thread for each."""
    source, wanted = StoreSource(), sequence(1)
    source.make(wanted)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    receiver, places = party("dc-b"), asyncio.Semaphore(100)
    most = [0, 0]

    async def one(number: int) -> None:
        async with places:
            sink = StoreSink(wanted)
            await receiver.fetch(endpoint, subscription(wanted, request_id=f"req-{number}"), sink)
            assert sink.whole
            if number % 50 == 0:
                most[:] = max(most[0], sockets()), max(most[1], len(threads()))

    before = sockets()
    async with asyncio.TaskGroup() as group:
        for number in range(2000):
            group.create_task(one(number))
    assert most[0] - before <= 2 * 4, "each connection has two ends in this process"
    assert source.pinned == 0


async def test_a_fetch_that_waits_holds_up_no_other_on_its_connection(party: Party) -> None:
    source, early, late = StoreSource(), sequence(4), sequence(4, salt="late")
    source.make(early)
    endpoint, receiver = await party("dc-a").serve(source, "127.0.0.1"), party("dc-b", streams=1)
    late_sink = StoreSink(late)
    async with asyncio.TaskGroup() as group:
        waits = group.create_task(receiver.fetch(endpoint, subscription(late), late_sink))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        sink = StoreSink(early)
        await receiver.fetch(endpoint, subscription(early), sink)
        assert sink.whole
        assert not waits.done()
        source.make(late)
    assert late_sink.whole


async def test_two_fetches_of_one_request_do_not_mix(party: Party) -> None:
    source, wanted = StoreSource(), sequence(6)
    endpoint, receiver = await party("dc-a").serve(source, "127.0.0.1"), party("dc-b", streams=1)
    sinks = [StoreSink(wanted), StoreSink(wanted)]
    async with asyncio.TaskGroup() as group:
        for sink in sinks:
            group.create_task(receiver.fetch(endpoint, subscription(wanted), sink))
        await asyncio.to_thread(source.wait_for_feeds, 2)
        source.make(wanted)
    assert all(sink.whole for sink in sinks)


async def test_idle_connections_are_closed_and_opened_again(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    receiver = party("dc-b", keep="200ms")
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1")) as proxy:
        for count in (1, 2):
            await receiver.fetch(proxy.endpoint, subscription(wanted), StoreSink(wanted))
            assert proxy.count == count
            await until(lambda: not any("peer" in name for name in threads()))


async def test_a_sender_of_a_new_epoch_gets_new_connections_and_the_old_ones_go(party: Party) -> None:
    wanted = sequence(2)
    old, new = StoreSource(), StoreSource(epoch="epoch-2")
    for source in (old, new):
        source.make(wanted)
    receiver, sink = party("dc-b"), StoreSink(wanted)
    first, second = [await party("dc-a").serve(source, "127.0.0.1") for source in (old, new)]
    async with TcpProxy(first) as proxy:
        await receiver.fetch(proxy.endpoint, subscription(wanted), StoreSink(wanted))
        proxy.retarget(second)  # The old one's connections live on, as those of a host that lost its power do.
        asked = msgspec.structs.replace(subscription(wanted), epoch="epoch-2")
        await receiver.fetch(proxy.endpoint, asked, sink)
        assert sink.whole
        assert proxy.count == 2
        await until(lambda: sum(name.startswith("pdd-tcp-peer") for name in threads()) == 2)


async def test_senders_that_come_and_go_leave_nothing_behind(party: Party) -> None:
    """Each at a port of its own, half of them gone without a word before the next one is asked."""
    wanted, receiver = sequence(1), party("dc-b", peers=4)
    before = sockets()
    for number in range(60):
        source = StoreSource()
        source.make(wanted)
        sender = party("dc-a")
        async with TcpProxy(await sender.serve(source, "127.0.0.1")) as proxy:
            sink = StoreSink(wanted)
            await receiver.fetch(proxy.endpoint, subscription(wanted, request_id=f"req-{number}"), sink)
            assert sink.whole
            if number % 2:
                await sender.close()
        await sender.close()
        await until(lambda: sockets() - before <= 2 * 4 + 4 and len(threads()) <= 2 * 4 + 4)
    await receiver.close()
    await until(lambda: sockets() <= before)


async def test_the_sender_idle_for_longest_makes_room_for_another(party: Party) -> None:
    wanted = sequence(2)
    receiver = party("dc-b", peers=2)
    endpoints = []
    for _ in range(4):
        source = StoreSource()
        source.make(wanted)
        endpoints.append(await party("dc-a").serve(source, "127.0.0.1"))
    for endpoint in endpoints * 2:
        sink = StoreSink(wanted)
        await receiver.fetch(endpoint, subscription(wanted), sink)
        assert sink.whole
    await until(lambda: sum(name.startswith("pdd-tcp-peer") for name in threads()) == 4)


async def test_where_all_kept_senders_are_in_use_a_fetch_waits_for_its_turn(party: Party) -> None:
    wanted, sources = sequence(2), [StoreSource(), StoreSource()]
    endpoints = [await party("dc-a").serve(source, "127.0.0.1") for source in sources]
    sources[1].make(wanted)
    receiver, sink = party("dc-b", peers=1), StoreSink(wanted)
    async with asyncio.TaskGroup() as group:
        group.create_task(receiver.fetch(endpoints[0], subscription(wanted), StoreSink(wanted)))
        await asyncio.to_thread(sources[0].wait_for_feeds, 1)
        with pytest.raises(TransferError, match="senders to which connections are kept are in use"):
            await receiver.fetch(endpoints[1], subscription(wanted, deadline=0.2), sink)
        waiting = group.create_task(receiver.fetch(endpoints[1], subscription(wanted), sink))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        sources[0].make(wanted)
    assert sink.whole


@pytest.mark.parametrize("who", ["receiver", "sender"])
async def test_many_fetches_end_when_a_side_closes(party: Party, who: str) -> None:
    source, wanted = StoreSource(), sequence(2)
    sender, receiver = party("dc-a"), party("dc-b")
    endpoint = await sender.serve(source, "127.0.0.1")
    fetches = [
        asyncio.create_task(receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted))) for _ in range(50)
    ]
    await asyncio.to_thread(source.wait_for_feeds, 50)
    await (sender if who == "sender" else receiver).close()
    for each in await asyncio.gather(*fetches, return_exceptions=True):
        assert isinstance(each, TransferError)
    await asyncio.to_thread(source.wait_for_feeds, 0)
