"""What goes first over a link, and what is known of it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.rpc import Line
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from plugins.transport_tcp.tests.counting import Party
from tests.waiting import until

LARGE = msgspec.structs.replace(LAYOUT, layers=32)
"""Blocks of 256 KiB."""
ELEPHANT = 24
"""Blocks, so 6 MiB: a second on this line."""


def line() -> Line:
    return Line(50e6, delay=0.01)


@pytest.mark.parametrize("order", ["shortest", "fifo"])
@pytest.mark.parametrize("other_receiver", [False, True])
async def test_a_small_transfer_overtakes_a_large_one_unless_the_order_is_fifo(
    party: Party, order: str, other_receiver: bool
) -> None:
    """To another receiver it goes as well where the large one's cannot take more, as on a machine that is too busy for
    longer than the slack: so of a few tries one is to show the order."""
    for _ in range(5):
        if (await overtaken(party, order, other_receiver) > ELEPHANT // 2) == (order == "shortest"):
            return
    raise AssertionError(f"a small transfer did not come as {order!r} says")


async def overtaken(party: Party, order: str, other_receiver: bool) -> int:
    """How many of a large transfer's blocks are not there when a small one, asked for later, is."""
    source = StoreSource(LARGE)
    large, small = sequence(ELEPHANT, LARGE), sequence(1, LARGE, salt="small")
    source.make([*large, *small])
    endpoint = await party("dc-a", {"dc-b": line()}, order=order).serve(source, "127.0.0.1")
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    done: list[int] = []
    behind: list[int] = []
    receiver = party("dc-b")
    other = party("dc-b") if other_receiver else receiver

    def large_done(index: int) -> None:
        done.append(index)
        loop.call_soon_threadsafe(begun.set)

    sinks = (
        StoreSink(large, LARGE, on_done=large_done),
        StoreSink(small, LARGE, on_done=lambda index: behind.append(ELEPHANT - len(done))),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(receiver.fetch(endpoint, subscription(large, layout=LARGE), sinks[0]))
        await begun.wait()
        asked = subscription(small, layout=LARGE, request_id="req-2")
        group.create_task(other.fetch(endpoint, asked, sinks[1]))
    assert all(sink.whole for sink in sinks)
    return behind[0]


async def test_a_higher_priority_goes_first(party: Party) -> None:
    source = StoreSource(LARGE)
    lists = [sequence(12, LARGE, salt=f"tenant-{n}") for n in range(2)]
    endpoint = await party("dc-a", {"dc-b": line()}, ageing=0.0).serve(source, "127.0.0.1")
    receiver, ended = party("dc-b"), []
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, wanted in enumerate(lists):
            asked = subscription(wanted, layout=LARGE, request_id=f"req-{number}")
            asked = msgspec.structs.replace(asked, priority=number)
            tasks.append(group.create_task(receiver.fetch(endpoint, asked, StoreSink(wanted, LARGE))))
            tasks[-1].add_done_callback(ended.append)
        await asyncio.to_thread(source.wait_for_feeds, 2)
        source.make([block for pair in zip(*lists, strict=True) for block in pair])
    assert ended == tasks[::-1]


async def test_the_first_part_of_a_large_fetch_counts_as_the_whole(party: Party) -> None:
    source = StoreSource(LARGE)
    part, whole = sequence(8, LARGE, salt="part"), sequence(12, LARGE, salt="whole")
    endpoint = await party("dc-a", {"dc-b": line()}, ageing=0.0).serve(source, "127.0.0.1")
    receiver, ended = party("dc-b"), []
    async with asyncio.TaskGroup() as group:
        asked = subscription(part, layout=LARGE, request_id="req-part")
        asked = msgspec.structs.replace(asked, behind=100 * LARGE.block_bytes)
        tasks = [group.create_task(receiver.fetch(endpoint, asked, StoreSink(part, LARGE)))]
        asked = subscription(whole, layout=LARGE, request_id="req-whole")
        tasks.append(group.create_task(receiver.fetch(endpoint, asked, StoreSink(whole, LARGE))))
        for task in tasks:
            task.add_done_callback(ended.append)
        await asyncio.to_thread(source.wait_for_feeds, 2)
        source.make([block for pair in zip(part, whole, strict=False) for block in pair] + whole[len(part) :])
    assert ended == tasks[::-1]


async def test_a_sender_drops_what_is_past_its_deadline(party: Party) -> None:
    """Also where the receiver does not say so: its own clock is not waited for."""
    source, wanted = StoreSource(LARGE), sequence(ELEPHANT, LARGE)
    source.make(wanted)
    endpoint = await party("dc-a", {"dc-b": Line(1e6, delay=0.0)}).serve(source, "127.0.0.1")
    asked = subscription(wanted, layout=LARGE, deadline=0.5)
    with pytest.raises(TransferError, match=r"24 of 24 blocks did not come|23 of 24"):
        await party("dc-b").fetch(endpoint, asked, StoreSink(wanted, LARGE))
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0


@pytest.mark.parametrize("emulated", [True, False])
async def test_bytes_of_a_cancelled_fetch_are_drained_and_others_go_on(party: Party, emulated: bool) -> None:
    """On one connection, in the middle of a block."""
    source = StoreSource(LARGE)
    lists = [sequence(ELEPHANT, LARGE, salt=f"tenant-{n}") for n in range(2)]
    for wanted in lists:
        source.make(wanted)
    endpoint = await party("dc-a", {"dc-b": line()} if emulated else {}).serve(source, "127.0.0.1")
    loop, first = asyncio.get_running_loop(), asyncio.Event()
    sinks = [
        StoreSink(lists[0], LARGE, on_done=lambda index: loop.call_soon_threadsafe(first.set)),
        StoreSink(lists[1], LARGE),
    ]
    receiver = party("dc-b", streams=1)
    cancelled, other = (
        asyncio.create_task(
            receiver.fetch(endpoint, subscription(wanted, layout=LARGE, request_id=f"req-{number}"), sink)
        )
        for number, (wanted, sink) in enumerate(zip(lists, sinks, strict=True))
    )
    await first.wait()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    memory = [bytes(sinks[0].memory(index)) for index in range(ELEPHANT)]
    assert (await other).resumed == 0
    assert sinks[1].whole
    assert memory == [bytes(sinks[0].memory(index)) for index in range(ELEPHANT)], "the memory is its owner's again"


async def test_a_link_s_telemetry_is_what_crossed_it(party: Party) -> None:
    source, wanted = StoreSource(LARGE), sequence(ELEPHANT, LARGE)
    sender = party("dc-a", {"dc-b": line()})
    endpoint = await sender.serve(source, "127.0.0.1")
    assert sender.telemetry() == ()
    receiver = party("dc-b")
    async with asyncio.TaskGroup() as group:
        group.create_task(receiver.fetch(endpoint, subscription(wanted, layout=LARGE), StoreSink(wanted, LARGE)))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        assert sender.telemetry()[0].queue == 0, "what is not made does not queue"
        source.make(wanted)
        await until(lambda: sender.telemetry()[0].queue > 0)
    (link,) = sender.telemetry()
    assert link.cluster == "dc-b"
    assert (link.queue, link.sent) == (0, ELEPHANT * LARGE.block_bytes)
    assert link.goodput is not None
    assert link.goodput <= 1.2 * 50e6 / 8, "it is no faster than the line"
    assert link.rtt is not None
    assert link.rtt >= 0.02
    assert receiver.telemetry() == (), "it sends nothing"


async def test_what_is_cancelled_queues_no_more(party: Party) -> None:
    source, wanted = StoreSource(LARGE), sequence(ELEPHANT, LARGE)
    source.make(wanted)
    links = {"dc-b": LinkFacts("wan", 1e9, 0.01, 2)}
    sender = party("dc-a", {"dc-b": Line(1e6, delay=0.01)}, links)
    endpoint = await sender.serve(source, "127.0.0.1")
    fetch = party("dc-b").fetch(endpoint, subscription(wanted, layout=LARGE), StoreSink(wanted, LARGE))
    transfer = asyncio.create_task(fetch)
    await until(lambda: bool(sender.telemetry()) and sender.telemetry()[0].queue > 0)
    transfer.cancel()
    await asyncio.wait([transfer])
    await until(lambda: sender.telemetry()[0].queue == 0)


async def test_a_receiver_that_takes_nothing_holds_up_no_other(party: Party) -> None:
    source = StoreSource(LARGE)
    stuck, wanted = sequence(ELEPHANT, LARGE, salt="stuck"), sequence(8, LARGE)
    source.make([*stuck, *wanted])
    endpoint = await party("dc-a").serve(source, "127.0.0.1")
    loop, go, first = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def block(index: int) -> None:
        loop.call_soon_threadsafe(first.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()

    slow = StoreSink(stuck, LARGE, on_done=block)
    transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(stuck, layout=LARGE), slow))
    await first.wait()
    sink = StoreSink(wanted, LARGE)
    await party("dc-b").fetch(endpoint, subscription(wanted, layout=LARGE), sink)
    assert sink.whole
    assert not transfer.done()
    go.set()
    await transfer
    assert slow.whole


async def test_a_fetch_that_fails_ends_no_other_on_its_connection(party: Party) -> None:
    source, early, late = StoreSource(), sequence(2), sequence(2, salt="late")
    endpoint, receiver = await party("dc-a").serve(source, "127.0.0.1"), party("dc-b", streams=1)
    sink = StoreSink(late)
    async with asyncio.TaskGroup() as group:
        waits = group.create_task(receiver.fetch(endpoint, subscription(late), sink))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        with pytest.raises(PddError, match="secret"):
            await receiver.fetch(
                endpoint, msgspec.structs.replace(subscription(early), secret="another"), StoreSink(early)
            )
        source.make(late)
    assert sink.whole
    assert waits.result().resumed == 0
