"""What a transfer brings when nothing goes wrong."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest

from pdd_runtime.errors import TransferError
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from plugins.transport_tcp.tests.counting import Party

PEER = str(Path(__file__).parent / "tcp_peer.py")
LARGE = msgspec.structs.replace(LAYOUT, layers=32)
"""Blocks of 256 KiB, for which a fetch opens all its streams."""


async def test_blocks_arrive_whole(party: Party) -> None:
    source, wanted = StoreSource(), sequence(20)
    source.make(wanted)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    sink = StoreSink(wanted)
    report = await party("dc-b").fetch(endpoint, subscription(wanted), sink)
    assert sink.whole
    assert (report.bytes, report.blocks, report.gone, report.resumed) == (20 * LAYOUT.block_bytes, 20, 0, 0)
    assert report.goodput > 0


async def test_blocks_are_sent_while_the_rest_is_made(party: Party) -> None:
    source, wanted = StoreSource(), sequence(6)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    loop, here = asyncio.get_running_loop(), asyncio.Queue[int]()
    sink = StoreSink(wanted, on_done=lambda index: loop.call_soon_threadsafe(here.put_nowait, index))
    transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), sink))
    for index, block in enumerate(wanted):
        assert here.empty()
        source.make([block])
        assert await here.get() == index, "a block arrives before the next is made"
    assert (await transfer).blocks == 6
    assert sink.whole


@pytest.mark.parametrize("streams", [1, 4])
async def test_several_streams_share_one_feed(party: Party, streams: int) -> None:
    source, wanted = StoreSource(LARGE), sequence(40, LARGE)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    sink = StoreSink(wanted, LARGE)
    transfer = asyncio.create_task(
        party("dc-b", streams=streams).fetch(endpoint, subscription(wanted, layout=LARGE), sink)
    )
    for block in wanted:
        source.make([block])
        await asyncio.sleep(0)
    await transfer
    assert sink.whole
    assert len(source.opened) == 1


async def test_both_directions_at_once(party: Party) -> None:
    sides = [(party("dc-a"), StoreSource()), (party("dc-b"), StoreSource())]
    endpoints = [await transport.serve(source, "127.0.0.1") for transport, source in sides]
    wanted = sequence(20)
    sinks = [StoreSink(wanted), StoreSink(wanted)]
    async with asyncio.TaskGroup() as group:
        for (transport, _), endpoint, sink in zip(sides, reversed(endpoints), sinks, strict=True):
            group.create_task(transport.fetch(endpoint, subscription(wanted), sink))
        for _, source in sides:
            source.make(wanted)
    assert all(sink.whole for sink in sinks)


async def test_many_fetches_at_once(party: Party) -> None:
    source = StoreSource(blocks=400)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    receiver, lists = party("dc-b"), [sequence(5, salt=f"tenant-{n}") for n in range(64)]
    sinks = [StoreSink(wanted) for wanted in lists]
    async with asyncio.TaskGroup() as group:
        for number, (wanted, sink) in enumerate(zip(lists, sinks, strict=True)):
            group.create_task(receiver.fetch(endpoint, subscription(wanted, request_id=f"req-{number}"), sink))
        for wanted in lists:
            source.make(wanted)
            await asyncio.sleep(0)
    assert all(sink.whole for sink in sinks)


async def test_blocks_that_will_not_come_are_counted(party: Party) -> None:
    source, wanted = StoreSource(), sequence(6)
    source.make(wanted[:4])
    source.end()
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    sink = StoreSink(wanted)
    report = await party("dc-b").fetch(endpoint, subscription(wanted), sink)
    assert (report.blocks, report.gone) == (4, 2)
    assert sorted(sink.arrived) == [0, 1, 2, 3]
    assert all(map(sink.right, sink.arrived))


async def test_nothing_wanted_is_nothing_done(party: Party) -> None:
    report = await party("dc-b").fetch("127.0.0.1:1", subscription([]), StoreSink([]))
    assert (report.bytes, report.blocks, report.gone) == (0, 0, 0)


async def test_a_wait_longer_than_the_io_timeout_is_no_stall(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    sink = StoreSink(wanted)
    transfer = asyncio.create_task(party("dc-b", io_timeout="900ms").fetch(endpoint, subscription(wanted), sink))
    await asyncio.sleep(2)
    source.make(wanted)
    assert (await transfer).resumed == 0
    assert sink.whole


async def test_ipv6_works(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    try:
        endpoint = await party("dc-a").serve(source, "::1")
    except TransferError:
        pytest.skip("this machine has no IPv6")
    sink = StoreSink(wanted)
    await party("dc-b").fetch(endpoint, subscription(wanted), sink)
    assert sink.whole


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:http"])
async def test_an_endpoint_that_is_none_is_refused(party: Party, endpoint: str) -> None:
    with pytest.raises(TransferError, match="is no endpoint"):
        await party("dc-b").fetch(endpoint, subscription(sequence(1)), StoreSink(sequence(1)))


async def test_separate_processes(party: Party) -> None:
    """Blocks made one by one in one process are fetched by another, and by this one."""
    blocks = 8
    server = await asyncio.create_subprocess_exec(sys.executable, PEER, "serve", str(blocks), stdin=PIPE, stdout=PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    endpoint = (await server.stdout.readline()).decode().strip()
    client = await asyncio.create_subprocess_exec(sys.executable, PEER, "fetch", endpoint, str(blocks), stdout=PIPE)
    assert client.stdout is not None
    wanted = sequence(blocks)
    sink = StoreSink(wanted)
    transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), sink))
    for _ in range(blocks):
        server.stdin.write(b"\n")
        await server.stdin.drain()
    assert (await transfer).blocks == blocks
    assert sink.whole
    assert (await client.stdout.readline()) == b"ok\n"
    server.stdin.close()
    assert await client.wait() == 0
    assert await server.wait() == 0
