"""After a cut, only what is missing is sent again."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import msgspec
import pytest

from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from plugins.transport_tcp.tests.counting import Party

LARGE = msgspec.structs.replace(LAYOUT, layers=256)
"""Blocks of 2 MiB, so of 32 frames of 64 KiB."""
FRAME = 64 << 10
LINKS = {"dc-a": LinkFacts("wan", 1e12, 0.0, 4), "dc-b": LinkFacts("wan", 1e12, 0.0, 4)}
"""All connections are opened at once."""
BLOCKS = 8
SIZE = BLOCKS * LARGE.block_bytes
OVERHEAD = SIZE // 500
"""Headers, beats and answers."""


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("after", [0.1, 0.55, 0.9])
async def test_a_cut_of_all_sends_at_most_one_frame_per_connection_again(
    party: Party, streams: int, after: float
) -> None:
    source, wanted = StoreSource(LARGE, BLOCKS), sequence(BLOCKS, LARGE)
    source.make(wanted)
    sink, receiver = StoreSink(wanted, LARGE), party("dc-b", links=LINKS, streams=streams)
    async with TcpProxy(await party("dc-a", links=LINKS, frame="64KiB").serve(source, "127.0.0.1")) as proxy:
        transfer = asyncio.create_task(receiver.fetch(proxy.endpoint, subscription(wanted, layout=LARGE), sink))
        while proxy.passed < after * SIZE:  # noqa: ASYNC110 - it has no event of its own
            await asyncio.sleep(0)
        proxy.cut()
        report = await transfer
        assert 1 <= report.resumed <= streams, "a connection that was just being opened may be cut for itself"
        assert proxy.passed <= SIZE + OVERHEAD + streams * FRAME
    assert sink.whole


async def test_a_cut_of_one_of_several_leaves_what_the_others_carry_alone(party: Party) -> None:
    source, wanted = StoreSource(LARGE, BLOCKS), sequence(BLOCKS, LARGE)
    source.make(wanted)
    sink, receiver = StoreSink(wanted, LARGE), party("dc-b", links=LINKS)
    faults = [None, Fault("cut", 10 * FRAME + 999), None, None]
    async with TcpProxy(await party("dc-a", links=LINKS, frame="64KiB").serve(source, "127.0.0.1"), *faults) as proxy:
        report = await receiver.fetch(proxy.endpoint, subscription(wanted, layout=LARGE), sink)
        assert report.resumed <= 1
        assert proxy.passed <= SIZE + OVERHEAD + FRAME
    assert sink.whole


@pytest.mark.parametrize("seed", range(4))
async def test_cuts_of_many_connections_at_any_moment_only_cost_time(party: Party, seed: int) -> None:
    """Also of one on which the sender was just asked to end what another one carried, and of one just opened."""
    chance = random.Random(seed)
    source, wanted = StoreSource(LARGE, BLOCKS), sequence(BLOCKS, LARGE)
    source.make(wanted)
    sink, receiver = StoreSink(wanted, LARGE), party("dc-b", links=LINKS, retry_delay="1ms")
    faults = [Fault("cut", chance.randrange(20 * FRAME)) for _ in range(20)]
    async with TcpProxy(await party("dc-a", links=LINKS, frame="64KiB").serve(source, "127.0.0.1"), *faults) as proxy:
        await receiver.fetch(proxy.endpoint, subscription(wanted, layout=LARGE), sink)
    assert sink.whole
    await asyncio.to_thread(source.wait_for_feeds, 0)


async def test_other_fetches_on_a_connection_that_breaks_are_resumed_as_well(party: Party) -> None:
    source, lists = StoreSource(blocks=256), [sequence(8, salt=f"tenant-{n}") for n in range(8)]
    sinks, receiver = [StoreSink(wanted) for wanted in lists], party("dc-b", streams=1)
    for wanted in lists:
        source.make(wanted[:6])
    async with TcpProxy(await party("dc-a").serve(source, "127.0.0.1"), Fault("cut", 300_000)) as proxy:
        async with asyncio.TaskGroup() as group:
            for number, (wanted, sink) in enumerate(zip(lists, sinks, strict=True)):
                asked = subscription(wanted, request_id=f"req-{number}")
                group.create_task(receiver.fetch(proxy.endpoint, asked, sink))
            await asyncio.to_thread(source.wait_for_feeds, 8)
            for wanted in lists:
                source.make(wanted[6:])
        assert proxy.count == 2
    assert all(sink.whole for sink in sinks)


async def test_a_sender_with_other_frames_than_before_is_asked_from_the_block_s_beginning(party: Party) -> None:
    """The same worker behind another edge's settings; whatever the reason, no byte lands in the wrong place."""
    source, wanted = StoreSource(LARGE, BLOCKS), sequence(BLOCKS, LARGE)
    source.make(wanted)
    sink = StoreSink(wanted, LARGE)
    first, second = [await party("dc-a", frame=size).serve(source, "127.0.0.1") for size in ("64KiB", "128KiB")]
    async with TcpProxy(first, *[Fault("cut", LARGE.block_bytes * 5 // 4)] * 4) as proxy:
        transfer = asyncio.create_task(party("dc-b").fetch(proxy.endpoint, subscription(wanted, layout=LARGE), sink))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        proxy.retarget(second)
        await transfer
    assert sink.whole


@pytest.mark.parametrize("seed", range(3))
async def test_faults_of_all_kinds_under_several_fetches_of_which_some_are_cancelled(party: Party, seed: int) -> None:
    chance, layout = random.Random(seed), msgspec.structs.replace(LAYOUT, layers=64)
    source, lists = StoreSource(layout, 36), [sequence(6, layout, salt=f"tenant-{n}") for n in range(6)]
    sinks = [StoreSink(wanted, layout) for wanted in lists]
    endpoint = await party("dc-a", links=LINKS, frame="64KiB").serve(source, "127.0.0.1")
    receiver = party("dc-b", links=LINKS, retry_delay="1ms", io_timeout="1s")
    kinds: tuple[Literal["cut", "flip", "freeze"], ...] = ("cut", "cut", "flip", "freeze")
    faults = [Fault(chance.choice(kinds), chance.randrange(16 * FRAME)) for _ in range(8)]
    async with TcpProxy(endpoint, *faults) as proxy:
        fetches = []
        for number, (wanted, sink) in enumerate(zip(lists, sinks, strict=True)):
            asked = subscription(wanted, layout=layout, request_id=f"req-{number}", deadline=60.0)
            fetches.append(asyncio.create_task(receiver.fetch(proxy.endpoint, asked, sink)))
        for wanted in lists:
            source.make(wanted)
            await asyncio.sleep(chance.random() * 0.01)
        for number in chance.sample(range(6), 2):
            fetches[number].cancel()
            await asyncio.sleep(chance.random() * 0.02)
        await asyncio.wait(fetches)
    for transfer, sink in zip(fetches, sinks, strict=True):
        assert transfer.cancelled() or sink.whole
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0
