"""What every transport does when the network, or the other side, goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import pytest

from pdd_runtime.errors import CapacityError, PddError, TransferError
from pdd_runtime.kv import Block
from pdd_runtime.plugins.transport import Transport
from pdd_runtime.testing.kv_parties import StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy
from pdd_runtime.testing.transport_fixtures import BLOCK, HOST, Party, TransportFixtures

BLOCKS = 4
"""Of the transfers that go wrong everywhere."""


@pytest.mark.asyncio
class TransportFaults(TransportFixtures):
    """A part of `TransportConformance`."""

    # Lines

    async def test_a_cut_anywhere_is_resumed_with_what_is_missing(self, party: Party) -> None:
        """Before, in and behind each block, and in what is said around them."""
        source, wanted = StoreSource(), sequence(BLOCKS)
        source.make(wanted)
        endpoint, receiver = await self._served(party("dc-a"), source), party("dc-b")
        for after in self._places(await self._crosses(receiver, endpoint, wanted)):
            sink, opened = StoreSink(wanted), len(source.opened)
            async with TcpProxy(endpoint, Fault("cut", after)) as proxy, asyncio.timeout(self.patience):
                report = await receiver.fetch(proxy.endpoint, subscription(wanted), sink)
            assert sink.whole, f"cut after {after} bytes: each block comes once"
            assert (report.blocks, report.gone) == (BLOCKS, 0)
            assert report.resumed <= 1
            # Behind the last block it may have been whole: what surrounds blocks varies by some bytes, as under TLS.
            if self.in_band and BLOCK <= after < BLOCKS * BLOCK:
                assert report.resumed == 1, f"cut after {after} bytes"
                # They are not blocks alone: the last one that fits may not have been whole.
                had = after // BLOCK - 1
                for again in source.opened[opened + 1 :]:
                    assert len(again.blocks) <= BLOCKS - had, f"cut after {after} bytes: it asked for what it had"
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0

    async def test_a_damaged_byte_anywhere_is_never_taken_for_right(self, party: Party) -> None:
        """In what a sender answers, in what it says before each block, and in a block: it may end the fetch with an
        error."""
        if not self.in_band:
            pytest.skip("the blocks do not cross the TCP connections that can be damaged")
        source, wanted = StoreSource(), sequence(BLOCKS)
        source.make(wanted)
        endpoint, receiver = await self._served(party("dc-a"), source), party("dc-b")

        async def spoil(at: int) -> None:
            sink, asked = StoreSink(wanted), subscription(wanted, deadline=4.0)
            async with TcpProxy(endpoint, Fault("flip", at)) as proxy:
                try:
                    report = await receiver.fetch(proxy.endpoint, asked, sink)
                except PddError:
                    pass
                else:
                    assert sink.whole, f"byte {at}: it says {report}, and {sink.arrived} arrived"
            assert not sink.wrong, f"byte {at}: a wrong block was done, and would go into the prefix cache"

        places = self._places(await self._crosses(receiver, endpoint, wanted))
        async with asyncio.timeout(2 * self.patience), asyncio.TaskGroup() as group:
            for at in places:
                group.create_task(spoil(at))
        sink = StoreSink(wanted)
        async with asyncio.timeout(self.patience):
            await receiver.fetch(endpoint, subscription(wanted), sink)
        assert sink.whole
        await asyncio.to_thread(source.wait_for_feeds, 0)

    # Senders

    async def test_who_restarts_at_the_same_address_is_asked_by_its_new_epoch(self, party: Party) -> None:
        """What runs ends, and what believes in the old epoch is refused, both by name; the new one is served."""
        old, new, wanted = StoreSource(), StoreSource(epoch="epoch-2"), sequence(6)
        for source in (old, new):
            source.make(wanted[:3])
        before, receiver, sink = party("dc-a"), party("dc-b"), StoreSink(wanted)
        async with TcpProxy(await self._served(before, old)) as proxy:
            running = asyncio.create_task(receiver.fetch(proxy.endpoint, subscription(wanted), sink))
            await asyncio.to_thread(old.wait_for_feeds, 1, self.patience)
            proxy.restart(await party("dc-a").serve(new, HOST))
            async with asyncio.timeout(self.patience):
                with pytest.raises(TransferError, match="epoch-2"):
                    await running
                await before.close()
                assert set(sink.arrived) <= {0, 1, 2}
                assert not sink.wrong
                new.make(wanted[3:])
                with pytest.raises(TransferError, match="epoch-2"):
                    await receiver.fetch(proxy.endpoint, subscription(wanted), StoreSink(wanted))
                for turn in range(2):
                    sink, asked = StoreSink(wanted), subscription(wanted, request_id=f"new-{turn}")
                    await receiver.fetch(proxy.endpoint, msgspec.structs.replace(asked, epoch="epoch-2"), sink)
                    assert sink.whole

    # Receivers

    async def test_a_slow_sink_holds_up_no_other(self, party: Party) -> None:
        """Of two fetches of the same pair of workers, one is at a sink that takes its time and for blocks that are not
        made: the other ends before."""
        source, slow, quick = StoreSource(), sequence(12), sequence(3, salt="quick")
        source.make(slow[:6])
        source.make(quick)
        endpoint, receiver = await party("dc-a").serve(source, HOST), party("dc-b")
        sinks = _Slow(slow), StoreSink(quick)
        async with asyncio.timeout(self.patience), asyncio.TaskGroup() as group:
            waits = group.create_task(receiver.fetch(endpoint, subscription(slow, request_id="slow"), sinks[0]))
            await asyncio.to_thread(source.wait_for_feeds, 1, self.patience)
            await receiver.fetch(endpoint, subscription(quick, request_id="quick"), sinks[1])
            assert sinks[1].whole
            assert not waits.done()
            source.make(slow[6:])
        assert sinks[0].whole, "nothing is lost of what a sink was slow to take"
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0

    @pytest.mark.parametrize("error", [CapacityError("no room"), MemoryError("no room")], ids=["capacity", "memory"])
    @pytest.mark.parametrize("where", ["memory", "done"])
    async def test_a_sink_out_of_memory_ends_its_fetch_with_its_error(
        self, party: Party, error: Exception, where: str
    ) -> None:
        """And no other: the sender lets go of all, and the next fetch is served."""

        class Full(StoreSink):
            def memory(self, index: int) -> memoryview:
                self._take(index, "memory")
                return super().memory(index)

            def done(self, index: int) -> None:
                self._take(index, "done")
                super().done(index)

            def _take(self, index: int, call: str) -> None:
                if (call, index) == (where, 2):
                    raise error

        source, wanted = StoreSource(), sequence(6)
        source.make(wanted)
        endpoint, receiver = await party("dc-a").serve(source, HOST), party("dc-b")
        for _ in range(2):
            full, sink = Full(wanted), StoreSink(wanted)
            async with asyncio.timeout(self.patience):
                with pytest.raises(type(error), match="no room"):
                    await receiver.fetch(endpoint, subscription(wanted), full)
                await asyncio.to_thread(source.wait_for_feeds, 0)
                assert source.pinned == 0
                await receiver.fetch(endpoint, subscription(wanted), sink)
            assert not full.wrong
            assert sink.whole

    async def test_fetches_of_one_request_id_are_fetches_of_their_own(self, party: Party) -> None:
        """At once and one after another: of the same blocks, and of others."""
        source, one, two = StoreSource(), sequence(6), sequence(4, salt="other")
        endpoint, receiver = await party("dc-a").serve(source, HOST), party("dc-b")
        sinks = [StoreSink(blocks) for blocks in (one, one, two)]
        async with asyncio.timeout(self.patience), asyncio.TaskGroup() as group:
            for sink in sinks:
                group.create_task(receiver.fetch(endpoint, subscription(sink.wanted), sink))
            await asyncio.to_thread(source.wait_for_feeds, 3, self.patience)
            source.make(one)
            source.make(two)
        for blocks in (two, one):
            sinks.append(StoreSink(blocks))
            async with asyncio.timeout(self.patience):
                report = await receiver.fetch(endpoint, subscription(blocks), sinks[-1])
            assert report.blocks == len(blocks)
        assert all(sink.whole for sink in sinks)
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0

    async def test_a_fetch_that_is_cancelled_ends_no_other_of_its_id(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(4)
        endpoint, receiver, sink = await party("dc-a").serve(source, HOST), party("dc-b"), StoreSink(wanted)
        both = [
            asyncio.create_task(receiver.fetch(endpoint, subscription(wanted), each))
            for each in (StoreSink(wanted), sink)
        ]
        await asyncio.to_thread(source.wait_for_feeds, 2, self.patience)
        both[0].cancel()
        await asyncio.to_thread(source.wait_for_feeds, 1, self.patience)
        source.make(wanted)
        async with asyncio.timeout(self.patience):
            await both[1]
        assert sink.whole
        assert both[0].cancelled()

    async def _crosses(self, receiver: Transport, endpoint: str, wanted: Sequence[Block]) -> int:
        """How many bytes come from the sender where nothing goes wrong."""
        async with TcpProxy(endpoint) as proxy, asyncio.timeout(self.patience):
            await receiver.fetch(proxy.endpoint, subscription(wanted), StoreSink(wanted))
            self._came_through(proxy)
            return proxy.passed

    def _places(self, total: int) -> list[int]:
        """Bytes where something may go wrong, of so many: close to where each block begins, and the last one; all
        over it where blocks go another way, or compressed."""
        if self.in_band and total >= BLOCKS * BLOCK:
            return [block * BLOCK + beside for block in range(BLOCKS) for beside in range(0, 421, 60)] + [total - 1]
        return [*range(0, total, max(1, total // 24)), total - 1]


class _Slow(StoreSink):
    """It takes its time over each block."""

    def done(self, index: int) -> None:
        time.sleep(0.03)
        super().done(index)
