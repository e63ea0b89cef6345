"""What a transfer does when the network, or a peer, goes wrong."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from pdd_tcp.inlet import Inlet

from pdd_runtime.errors import Cancelled, TransferError
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from plugins.transport_tcp.tests.counting import Party

BLOCK = LAYOUT.block_bytes
LARGE = msgspec.structs.replace(LAYOUT, layers=32)


@pytest.mark.parametrize("after", [0, 10, 100, BLOCK // 2, 3 * BLOCK, 7 * BLOCK + 77])
async def test_a_cut_is_resumed_with_what_is_missing(party: Party, after: int) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1"), Fault("cut", after)) as proxy:
        report = await party("dc-b").fetch(proxy.endpoint, subscription(wanted), sink)
    assert sink.whole, "each block came once"
    assert report.blocks == 10
    assert report.resumed == (after > 60)


async def test_a_cut_of_one_stream_of_several_is_resumed(party: Party) -> None:
    source, wanted = StoreSource(LARGE), sequence(40, LARGE)
    source.make(wanted)
    sink = StoreSink(wanted, LARGE)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    async with TcpProxy(endpoint, None, Fault("cut", LARGE.block_bytes * 3 // 2), None, None) as proxy:
        await party("dc-b").fetch(proxy.endpoint, subscription(wanted, layout=LARGE), sink)
    assert sink.whole


async def test_cuts_again_and_again_only_cost_time(party: Party) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    faults = [Fault("cut", BLOCK * 3 // 2)] * 9
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1"), *faults) as proxy:
        report = await party("dc-b", retry_delay="1ms").fetch(proxy.endpoint, subscription(wanted), sink)
    assert sink.whole
    assert report.resumed == 9


@pytest.mark.parametrize("after", [12, 30, 50, 70, 90, BLOCK // 2, 2 * BLOCK])
async def test_a_damaged_byte_is_noticed_and_the_block_comes_again(party: Party, after: int) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1"), Fault("flip", after)) as proxy:
        await party("dc-b", io_timeout="1s").fetch(proxy.endpoint, subscription(wanted), sink)
        assert proxy.count >= 2, "and once more where this host was slower than `io_timeout`"
    assert sink.whole, "no block was done twice, or with a wrong byte"


async def test_a_line_that_spoils_every_block_is_given_up(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    faults = [Fault("flip", BLOCK // 2)] * 20
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1"), *faults) as proxy:
        with pytest.raises(TransferError, match="9 frames came damaged"):
            await party("dc-b", retry_delay="1ms").fetch(proxy.endpoint, subscription(wanted), StoreSink(wanted))
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0


async def test_a_peer_that_hangs_is_given_up_and_the_rest_asked_for_again(party: Party) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1"), Fault("freeze", BLOCK * 7 // 2)) as proxy:
        report = await party("dc-b", io_timeout="2s").fetch(proxy.endpoint, subscription(wanted), sink)
    assert sink.whole
    assert report.resumed == 1


async def test_a_restarted_sender_is_no_longer_asked(party: Party) -> None:
    source, wanted = StoreSource(), sequence(10)
    source.make(wanted[:3])
    loop, three = asyncio.get_running_loop(), asyncio.Event()
    sink = StoreSink(wanted, on_done=lambda index: loop.call_soon_threadsafe(three.set) if index == 2 else None)
    first = party("dc-a")
    again = await party("dc-a").serve(StoreSource(epoch="epoch-2"), "127.0.0.1")
    async with TcpProxy(await first.serve(source, "127.0.0.1")) as proxy:
        transfer = asyncio.create_task(party("dc-b").fetch(proxy.endpoint, subscription(wanted), sink))
        await three.wait()
        proxy.restart(again)
        with pytest.raises(TransferError, match="epoch is epoch-2, not epoch-1"):
            await transfer
    assert sorted(sink.arrived) == [0, 1, 2]


async def test_a_sender_that_shuts_down_says_so(party: Party) -> None:
    source, wanted = StoreSource(), sequence(3)
    sender = party("dc-a")
    endpoint = await sender.serve(source, "127.0.0.1")
    transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted)))
    await asyncio.to_thread(source.wait_for_feeds, 1)
    await sender.close()
    with pytest.raises(TransferError, match="shuts down"):
        await transfer
    assert source.feeds == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Cancelled("the worker closes"), "the worker closes"),
        (TransferError("the block is lost"), "the block is lost"),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a bug"),
    ],
)
async def test_what_the_feed_raises_ends_the_fetch(party: Party, error: Exception, text: str) -> None:
    source, wanted = StoreSource(), sequence(3)
    source.make(wanted[:1])
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted)))
    await asyncio.to_thread(source.wait_for_feeds, 1)
    source.fail(error)
    with pytest.raises(TransferError, match=text):
        await transfer


async def test_a_deadline_ends_the_fetch_and_names_the_last_trouble(party: Party) -> None:
    wanted = sequence(2)
    with pytest.raises(TransferError, match=r"deadline of 0.3 s has passed; last trouble: cannot connect") as late:
        await party("dc-b").fetch("127.0.0.1:1", subscription(wanted, deadline=0.3), StoreSink(wanted))
    assert late.value.where == "req-1"


async def test_a_deadline_holds_while_blocks_are_waited_for(party: Party) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted[:2])
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    sink = StoreSink(wanted)
    with pytest.raises(TransferError, match="2 of 4 blocks did not come"):
        await party("dc-b").fetch(endpoint, subscription(wanted, deadline=0.5), sink)
    assert sorted(sink.arrived) == [0, 1]
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0


async def test_a_sink_that_fails_ends_the_fetch_with_its_error(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")

    def full(index: int) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted, on_done=full))


async def test_what_breaks_the_connecting_thread_ends_its_fetches_alone(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    endpoint, receiver, sink = await party("dc-a").serve(source, "127.0.0.1"), party("dc-b"), StoreSink(wanted)

    def start(inlet: Inlet) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Inlet, "start", start)
        with pytest.raises(TransferError, match="can't start new thread"):
            await receiver.fetch(endpoint, subscription(wanted, deadline=600), sink)
    await receiver.fetch(endpoint, subscription(wanted), sink)
    assert sink.whole
