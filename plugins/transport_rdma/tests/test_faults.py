"""Peers that die, hang, come back, or are wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec
import pytest
from pdd_rdma.transport import RdmaTransport
from pdd_rdma.wire import Offered
from rdma_liar import liar
from rdma_peer import LARGE, of
from rdma_processes import peer

from pdd_runtime.errors import TransferError
from pdd_runtime.kv import KvLayout
from pdd_runtime.testing.kv_parties import StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import TcpProxy

Party = Callable[..., RdmaTransport]
HOST = "127.0.0.1"
PATIENCE = 40.0


class Watched(StoreSink):
    """Says when its first block is there."""

    def __init__(self, blocks: int, layout: KvLayout = LARGE) -> None:
        loop, self.first = asyncio.get_running_loop(), asyncio.Event()
        super().__init__(
            sequence(blocks, layout), layout, on_done=lambda index: loop.call_soon_threadsafe(self.first.set)
        )


# Workers that come back, and blocks that are not what they are said to be.


async def test_a_worker_that_restarts_at_the_same_address_is_met_anew(party: Party) -> None:
    """What was known of the first is worth nothing: another agent, another memory."""
    wanted = sequence(6)
    first, second = StoreSource(), StoreSource()
    first.make(wanted)
    second.make(sequence(3, salt="others"))
    second.make(wanted)
    before = party("dc-a", first.store)
    receiver, after = party("dc-b"), await party("dc-a", second.store).serve(second, HOST)
    async with asyncio.timeout(PATIENCE), TcpProxy(await before.serve(first, HOST)) as proxy:
        for turn in range(2):
            sink = StoreSink(wanted)
            report = await receiver.fetch(proxy.endpoint, subscription(wanted, request_id=f"req-{turn}"), sink)
            assert sink.whole
            assert report.resumed == 0
            if turn == 0:
                await before.close()
                proxy.restart(after)
        assert len(second.opened) == 1


async def test_a_damaged_block_is_asked_for_again(party: Party) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    sink = StoreSink(wanted)

    def lie(session: int, true: Offered) -> Offered:
        return msgspec.structs.replace(true, checksum=true.checksum ^ (session == 0 and true.index == 2))

    async with liar(source, lie) as endpoint, asyncio.timeout(PATIENCE):
        report = await party("dc-b").fetch(endpoint, subscription(wanted), sink)
    assert sink.whole
    assert report.resumed == 1
    assert wanted[2].name in {block.name for block in source.opened[1].blocks}


@pytest.mark.parametrize(
    "lie",
    [
        lambda session, true: msgspec.structs.replace(true, checksum=true.checksum ^ 1),
        lambda session, true: msgspec.structs.replace(true, number=true.number ^ 1),
    ],
    ids=["checksum", "another block"],
)
async def test_a_sender_that_is_always_wrong_is_given_up(party: Party, lie: Callable[[int, Offered], Offered]) -> None:
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with liar(source, lie) as endpoint, asyncio.timeout(PATIENCE):
        with pytest.raises(TransferError, match="did not come") as failed:
            await party("dc-b", retry_delay="1ms").fetch(endpoint, subscription(wanted), sink)
    assert "damaged" in failed.value.why
    assert sink.arrived == []


async def test_a_block_that_is_nowhere_is_an_error_by_the_deadline(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with liar(source, lambda session, true: msgspec.structs.replace(true, number=10_000)) as endpoint:
        with pytest.raises(TransferError, match="did not come"):
            await party("dc-b").fetch(endpoint, subscription(wanted, deadline=1.0), sink)
    assert sink.arrived == []


async def test_without_checksums_a_block_counts_only_if_it_was_still_held(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    source.make(wanted)
    sink = StoreSink(wanted)
    async with liar(source, lambda session, true: true, holds=False) as endpoint:
        with pytest.raises(TransferError, match="did not come"):
            await party("dc-b", checksums=False).fetch(endpoint, subscription(wanted, deadline=1.0), sink)
    assert sink.arrived == []


# Processes that die or hang.


@pytest.mark.parametrize("tls", ["all", "tcp"])
async def test_a_sender_that_is_killed_fails_the_fetch_and_nothing_else(party: Party, tls: str) -> None:
    sink = Watched(40)
    receiver = party("dc-b", sink.store, tls=tls)
    async with peer("serve", tls, 40) as (process, endpoint):
        asked = subscription(sink.wanted, layout=LARGE, deadline=1.5)
        transfer = asyncio.create_task(receiver.fetch(endpoint, asked, sink))
        await asyncio.wait({transfer, asyncio.ensure_future(sink.first.wait())}, return_when="FIRST_COMPLETED")
        process.kill()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({transfer})
    if transfer.exception() is None:
        assert sink.whole, "it was faster"
    else:
        assert isinstance(transfer.exception(), TransferError)
    assert not sink.wrong
    assert all(map(sink.right, sink.arrived))
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    other = StoreSink(wanted)
    async with asyncio.timeout(PATIENCE):
        endpoint = await party("dc-a", source.store, tls=tls).serve(source, HOST)
        await receiver.fetch(endpoint, subscription(wanted), other)
    assert other.whole


@pytest.mark.parametrize("tls", ["all", "tcp"])
async def test_a_receiver_that_is_killed_frees_the_senders_blocks(party: Party, tls: str) -> None:
    source = StoreSource(LARGE, 40)
    source.make(sequence(39, LARGE))
    sender = party("dc-a", source.store, tls=tls)
    async with peer("fetch", tls, 40, await sender.serve(source, HOST)) as (process, _):
        process.kill()
        await asyncio.to_thread(source.wait_for_feeds, 0, PATIENCE)
    assert source.pinned == 0


async def test_what_a_hung_sender_says_later_touches_nothing(party: Party) -> None:
    """Over TCP the sender's software answers a read: one that hangs in the midst of it, and is there again when the
    fetch has long failed, must not write into memory that is others' by then."""
    huge = of(8)  # More is on its way than fits between the sockets.
    sink = Watched(8, huge)
    receiver = party("dc-b", sink.store, tls="tcp")
    async with peer("serve", "tcp", 8, 8) as (process, endpoint):
        asked = subscription(sink.wanted, layout=huge, deadline=60.0)
        transfer = asyncio.create_task(receiver.fetch(endpoint, asked, sink))
        await sink.first.wait()
        os.kill(process.pid, signal.SIGSTOP)
        transfer.cancel()
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait({transfer})
        assert len(sink.arrived) < 8, "nothing was on its way when the sender hung"
        memory = sink.store.buffer()
        memory[:] = bytes(len(memory))
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert bytes(memory) == bytes(len(memory))
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    other = StoreSink(wanted)
    async with asyncio.timeout(PATIENCE):
        again = await party("dc-a", source.store, tls="tcp").serve(source, HOST)
        await receiver.fetch(again, subscription(wanted), other)
    assert other.whole


@pytest.mark.parametrize("tls", ["all", "tcp"])
async def test_a_cancelled_fetch_leaves_its_memory_alone(party: Party, tls: str) -> None:
    source = StoreSource(LARGE, 40)
    source.make(sequence(40, LARGE))
    endpoint = await party("dc-a", source.store, tls=tls).serve(source, HOST)
    sink = Watched(40)
    transfer = asyncio.create_task(
        party("dc-b", sink.store, tls=tls).fetch(endpoint, subscription(sink.wanted, layout=LARGE), sink)
    )
    await sink.first.wait()
    transfer.cancel()
    await asyncio.wait({transfer})
    memory = sink.store.buffer()
    memory[:] = bytes(len(memory))
    await asyncio.to_thread(source.wait_for_feeds, 0)
    await asyncio.sleep(0.2)
    assert bytes(memory) == bytes(len(memory))
    assert source.pinned == 0


async def test_a_small_fetch_has_its_turn_among_large_ones(party: Party) -> None:
    large, small = StoreSource(LARGE, 40), StoreSource()
    wanted = sequence(4)
    large.make(sequence(40, LARGE))
    small.make(wanted)
    far = await party("dc-a", large.store, tls="tcp").serve(large, HOST)
    near = await party("dc-a", small.store, tls="tcp").serve(small, HOST)
    sink, mouse = Watched(40), StoreSink(wanted)
    receiver = party("dc-b", sink.store, tls="tcp")

    async def elephants() -> None:
        while True:
            await receiver.fetch(far, subscription(sink.wanted, layout=LARGE, deadline=60.0), sink)

    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        running = group.create_task(elephants())
        await sink.first.wait()
        await receiver.fetch(near, subscription(wanted, request_id="req-2"), mouse)
        running.cancel()
    assert mouse.whole
