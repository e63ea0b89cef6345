"""The conformance suite for transports. Subclass it in your tests and name your class:

```python
class TestMyTransport(TransportConformance):
    plugin = MyTransport
```

It is run with the defaults of `MyTransport.Config`; override `config` for other settings. What a transport does not
offer it says in the class variables of `TransportFixtures`, and those tests are skipped.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, LayoutError, PddError, TransferError
from pdd_runtime.kv import Block
from pdd_runtime.plugins.transport import LinkTelemetry, Subscription, Transport
from pdd_runtime.rpc import Line
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.transport_fault_suite import TransportFaults
from pdd_runtime.testing.transport_fixtures import BLOCK, HOST, Party, left, no_more


@pytest.mark.asyncio
class TransportConformance(TransportFaults):
    """What every transport promises."""

    # Whole blocks

    @pytest.mark.parametrize("blocks", [1, 20])
    async def test_blocks_arrive_whole_and_once(self, party: Party, blocks: int) -> None:
        source, wanted = StoreSource(), sequence(blocks)
        source.make(wanted)
        endpoint = await party("dc-a").serve(source, HOST)
        sink = StoreSink(wanted)
        async with asyncio.timeout(self.patience):
            report = await party("dc-b").fetch(endpoint, subscription(wanted), sink)
        assert not sink.wrong, "a block was done before its bytes were right"
        assert sink.whole
        assert (report.blocks, report.bytes, report.gone) == (blocks, blocks * BLOCK, 0)
        assert report.seconds > 0
        assert report.resumed == 0
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0, "the sender's blocks are still pinned"

    async def test_blocks_come_in_order_while_the_rest_is_made(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(6)
        endpoint = await party("dc-a").serve(source, HOST)
        loop, here = asyncio.get_running_loop(), asyncio.Queue[int]()
        sink = StoreSink(wanted, on_done=lambda index: loop.call_soon_threadsafe(here.put_nowait, index))
        async with asyncio.timeout(self.patience), asyncio.TaskGroup() as group:
            transfer = group.create_task(party("dc-b").fetch(endpoint, subscription(wanted), sink))
            await asyncio.to_thread(source.wait_for_feeds, 1)
            for index, block in enumerate(wanted):
                assert here.empty(), "a block came that was not made"
                source.make([block])
                assert await here.get() == index, "a block comes before the next one is made"
        assert transfer.result().blocks == 6
        assert sink.whole

    async def test_what_is_gone_is_counted_and_the_rest_comes(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(6)
        source.make(wanted[:4])
        endpoint = await party("dc-a").serve(source, HOST)
        sink = StoreSink(wanted)
        async with asyncio.timeout(self.patience), asyncio.TaskGroup() as group:
            transfer = group.create_task(party("dc-b").fetch(endpoint, subscription(wanted), sink))
            await asyncio.to_thread(source.wait_for_feeds, 1)
            source.end()
        report = transfer.result()
        assert (report.blocks, report.gone, report.bytes) == (4, 2, 4 * BLOCK)
        assert sorted(sink.arrived) == [0, 1, 2, 3]
        assert not sink.wrong

    async def test_two_readers_of_one_source_at_once(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(10)
        endpoint = await party("dc-a").serve(source, HOST)
        sinks = [StoreSink(wanted), StoreSink(wanted)]
        near, far = party("dc-a"), party("dc-b")
        async with asyncio.timeout(self.patience), asyncio.TaskGroup() as group:
            group.create_task(near.fetch(endpoint, subscription(wanted, cluster="dc-a"), sinks[0]))
            group.create_task(far.fetch(endpoint, subscription(wanted), sinks[1]))
            await asyncio.to_thread(source.wait_for_feeds, 2)
            source.make(wanted)
        assert sinks[0].whole
        assert sinks[1].whole
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0

    async def test_a_worker_sends_and_receives_at_once(self, party: Party) -> None:
        sources, wanted = (StoreSource(), StoreSource()), sequence(8)
        pair = party("dc-a"), party("dc-b")
        endpoints = [await side.serve(source, HOST) for side, source in zip(pair, sources, strict=True)]
        sinks = StoreSink(wanted), StoreSink(wanted)
        async with asyncio.timeout(self.patience), asyncio.TaskGroup() as group:
            group.create_task(pair[1].fetch(endpoints[0], subscription(wanted), sinks[0]))
            group.create_task(pair[0].fetch(endpoints[1], subscription(wanted, cluster="dc-a"), sinks[1]))
            for source in sources:
                source.make(wanted)
        assert sinks[0].whole
        assert sinks[1].whole

    # Refusals and failures

    @pytest.mark.parametrize("what", ["epoch", "fingerprint", "secret"])
    async def test_a_refusal_reaches_the_receiver_with_its_words(self, party: Party, what: str) -> None:
        source, wanted = StoreSource(), sequence(2)
        source.make(wanted)
        endpoint = await party("dc-a").serve(source, HOST)
        sink, asked = StoreSink(wanted), subscription(wanted)
        other: dict[str, Any] = {what: "another"}
        begun = now()
        with pytest.raises(TransferError, match="model is" if what == "fingerprint" else what) as refused:
            await party("dc-b").fetch(endpoint, msgspec.structs.replace(asked, **other), sink)
        assert type(refused.value) is TransferError
        assert now() - begun < 10, "a refusal is final: asking again until the deadline is no use"
        assert sink.arrived == []
        assert source.opened == []

    async def test_a_refused_layout_keeps_the_class_of_its_error(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(2)
        endpoint = await party("dc-a").serve(source, HOST)
        other = msgspec.structs.replace(LAYOUT, rope="interleaved")
        with pytest.raises(LayoutError, match="lay out KV differently") as refused:
            await party("dc-b").fetch(endpoint, subscription(wanted, layout=other), StoreSink(wanted))
        assert "rope" in refused.value.where

    @pytest.mark.parametrize("error", [Cancelled("the worker closes"), TransferError("the block is lost")])
    async def test_what_the_feed_raises_ends_the_fetch_with_its_words(self, party: Party, error: PddError) -> None:
        source, wanted = StoreSource(), sequence(3)
        source.make(wanted[:1])
        endpoint = await party("dc-a").serve(source, HOST)
        transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted)))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        source.fail(error)
        with pytest.raises(PddError, match=error.what):
            await transfer
        await asyncio.to_thread(source.wait_for_feeds, 0)

    async def test_nobody_at_the_endpoint_is_an_error_by_the_deadline(self, party: Party) -> None:
        sender = party("dc-a")
        endpoint = await sender.serve(StoreSource(), HOST)
        await sender.close()
        wanted = sequence(2)
        async with asyncio.timeout(self.patience):
            with pytest.raises(TransferError):
                await party("dc-b").fetch(endpoint, subscription(wanted, deadline=0.5), StoreSink(wanted))

    async def test_the_deadline_holds_and_what_arrived_stays(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(4)
        source.make(wanted[:2])
        endpoint = await party("dc-a").serve(source, HOST)
        sink = StoreSink(wanted)
        begun = now()
        with pytest.raises(PddError):
            await party("dc-b").fetch(endpoint, subscription(wanted, deadline=1.0), sink)
        assert 0.5 < now() - begun < 6
        assert sorted(sink.arrived) == [0, 1]
        assert sink.right(0)
        assert sink.right(1)
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0

    # Leaving

    async def test_a_cancelled_fetch_frees_the_senders_pins(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(6)
        source.make(wanted[:3])
        endpoint = await party("dc-a").serve(source, HOST)
        sink = StoreSink(wanted)
        transfer = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted), sink))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        transfer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await transfer
        arrived = list(sink.arrived)
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0
        source.make(wanted[3:])
        await asyncio.sleep(0.05)
        assert sink.arrived == arrived, "the sink's memory is its owner's again"

    async def test_close_ends_what_runs_and_may_come_twice(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(4)
        sender, receiver = party("dc-a"), party("dc-b")
        endpoint = await sender.serve(source, HOST)
        transfer = asyncio.create_task(receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted)))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        async with asyncio.timeout(self.patience):
            await receiver.close()
            with pytest.raises(PddError):
                await transfer
            await receiver.close()
            await sender.close()
        assert source.feeds == []

    async def test_a_sender_that_closes_drops_its_feeds(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(4)
        source.make(wanted[:2])
        sender = party("dc-a")
        endpoint = await sender.serve(source, HOST)
        fetch = party("dc-b").fetch(endpoint, subscription(wanted, deadline=3.0), StoreSink(wanted))
        transfer = asyncio.create_task(fetch)
        await asyncio.to_thread(source.wait_for_feeds, 1)
        await sender.close()
        assert source.feeds == []
        assert source.pinned == 0
        async with asyncio.timeout(self.patience):
            with pytest.raises(PddError):
                await transfer

    async def test_100_fetches_leave_no_thread_and_no_socket(self, party: Party) -> None:
        """A third of them are cancelled. Threads and connections may be kept, but hardly more by the hundredth fetch
        than by the tenth."""
        source, wanted = StoreSource(), sequence(8)
        source.make(wanted[:6])
        endpoint, receiver = await party("dc-a").serve(source, HOST), party("dc-b")

        async def one(number: int) -> None:
            sink = StoreSink(wanted)
            fetch = receiver.fetch(endpoint, subscription(wanted, request_id=f"req-{number}"), sink)
            transfer = asyncio.create_task(fetch)
            if number % 3 == 0:
                await asyncio.sleep(number % 7 * 0.003)
                transfer.cancel()
            await asyncio.wait([transfer])
            assert transfer.cancelled() or (transfer.result().blocks == 8 and sink.whole)

        async def some(numbers: range) -> None:
            async with asyncio.timeout(3 * self.patience), asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(one(number))
                if numbers.start == 0:
                    await asyncio.sleep(0.02)
                    source.make(wanted[6:])
            await asyncio.to_thread(source.wait_for_feeds, 0)

        await some(range(10))
        await asyncio.sleep(0.3)
        tenth = left()
        for start in range(10, 100, 10):
            await some(range(start, start + 10))
        await self._until(lambda: no_more(tenth), lambda: f"after 10 fetches there were {tenth}, after 100 {left()}")
        assert source.pinned == 0

    async def test_the_thousandth_fetch_finds_no_more_than_the_hundredth(self, party: Party) -> None:
        """Small ones, many at once: neither side keeps anything of each of them."""
        source, wanted = StoreSource(), sequence(1)
        source.make(wanted)
        sender, receiver = party("dc-a"), party("dc-b")
        endpoint = await sender.serve(source, HOST)

        async def some(numbers: range) -> None:
            async with asyncio.timeout(3 * self.patience), asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(receiver.fetch(endpoint, _small(number, wanted), StoreSink(wanted)))

        await some(range(100))
        hundredth = left()
        for start in range(100, 1000, 50):
            await some(range(start, start + 50))
        await self._until(lambda: no_more(hundredth), lambda: f"after 100 there were {hundredth}, after 1000 {left()}")
        sink = StoreSink(wanted)
        assert (await receiver.fetch(endpoint, _small(1000, wanted), sink)).blocks == 1
        assert sink.whole
        await asyncio.to_thread(source.wait_for_feeds, 0)
        assert source.pinned == 0

    # What it says of itself

    async def test_telemetry_is_of_what_was_sent(self, party: Party) -> None:
        if self.plugin.telemetry is Transport.telemetry:
            pytest.skip("the transport has no telemetry")
        source, wanted = StoreSource(), sequence(10)
        source.make(wanted[:6])
        sender, receiver = party("dc-a"), party("dc-b")
        endpoint = await sender.serve(source, HOST)

        def of() -> list[LinkTelemetry]:
            return [each for each in sender.telemetry() if each.cluster == "dc-b"]

        def queue() -> int:
            return sum(each.queue for each in of())

        half = asyncio.create_task(receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted)))
        await asyncio.to_thread(source.wait_for_feeds, 1)
        half.cancel()
        await asyncio.wait([half])
        await asyncio.to_thread(source.wait_for_feeds, 0)
        await self._until(lambda: queue() == 0, lambda: f"nobody waits any more, and in the queue are {queue()} bytes")
        source.make(wanted[6:])
        before = sum(each.sent for each in of())
        assert before <= 6 * BLOCK
        async with asyncio.timeout(self.patience):
            await receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted))
        await asyncio.to_thread(source.wait_for_feeds, 0)
        await self._until(lambda: queue() == 0, lambda: f"all has come, and in the queue are {queue()} bytes")
        (link,) = of()
        assert 0 < link.sent - before <= 10 * BLOCK, "it counts payload, once"
        assert link.goodput is None or link.goodput > 0
        assert link.rtt is None or link.rtt > 0
        assert link.retransmits >= 0
        assert receiver.telemetry() == (), "it has sent nothing"

    # Networks

    async def test_an_emulated_line_sets_the_pace(self, party: Party) -> None:
        if not self.emulates:
            pytest.skip("the transport does not emulate lines")
        source, wanted = StoreSource(), sequence(8)
        source.make(wanted)
        line = Line(bandwidth=4e6, delay=0.05)
        endpoint = await party("dc-a", {"dc-b": line}).serve(source, HOST)
        sink = StoreSink(wanted)
        begun = now()
        async with asyncio.timeout(self.patience):
            await party("dc-b", {"dc-a": Line(bandwidth=4e6, delay=0.05)}).fetch(endpoint, subscription(wanted), sink)
        assert now() - begun >= 8 * BLOCK * 8 / 4e6 + 0.05, "it was faster than the line"
        assert sink.whole


def _small(number: int, wanted: list[Block]) -> Subscription:
    return subscription(wanted, request_id=f"req-{number}")
