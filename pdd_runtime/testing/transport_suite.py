"""The conformance suite for transports. Subclass it in your tests and name your class:

```python
class TestMyTransport(TransportConformance):
    plugin = MyTransport
```

It is run with the defaults of `MyTransport.Config`; override `config` for other settings. What a transport does not
offer it says in the class variables `tcp` and `emulates`, and those tests are skipped.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import pytest_asyncio
from pydantic import BaseModel

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, LayoutError, PddError, TransferError
from pdd_runtime.plugins.transport import Transport
from pdd_runtime.rpc import Line
from pdd_runtime.testing.kv_parties import LAYOUT, Context, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import Fault, TcpProxy

HOST = "127.0.0.1"
PATIENCE = 20.0
"""Seconds after which a fetch counts as hung."""
BLOCK = LAYOUT.block_bytes

Party = Callable[..., Transport]


@pytest.mark.asyncio
class TransportConformance:
    """What every transport promises."""

    plugin: ClassVar[type[Transport]]
    tcp: ClassVar[bool] = True
    """Its endpoints are `host:port`, and a fetch is made over TCP connections to it: so it can be cut there."""
    emulates: ClassVar[bool] = True
    """It sends at the pace of an emulated line, where the context has one."""

    @pytest.fixture
    def config(self) -> BaseModel:
        return self.plugin.Config.model_validate({})

    @pytest_asyncio.fixture
    async def party(self, config: BaseModel) -> AsyncGenerator[Party, None]:
        """Makes the transports of workers; closes them at the end, and holds that nothing of them is left."""
        await asyncio.to_thread(lambda: None)
        before = _left()
        async with AsyncExitStack() as stack:

            def make(cluster: str, lines: dict[str, Line] | None = None) -> Transport:
                context = Context(cluster, lines)
                transport = self.plugin(config, context)
                stack.push_async_callback(transport.close)
                serve = transport.serve

                async def at_home(source: StoreSource, host: str) -> str:
                    context.memory = source.store.buffer()
                    return await serve(source, host)

                transport.serve = at_home  # type: ignore[method-assign, assignment]
                return transport

            yield make
        await _until(lambda: _no_more(before), lambda: f"a closed transport leaves {_left()}, and there were {before}")

    # Whole blocks

    @pytest.mark.parametrize("blocks", [1, 20])
    async def test_blocks_arrive_whole_and_once(self, party: Party, blocks: int) -> None:
        source, wanted = StoreSource(), sequence(blocks)
        source.make(wanted)
        endpoint = await party("dc-a").serve(source, HOST)
        sink = StoreSink(wanted)
        async with asyncio.timeout(PATIENCE):
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
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
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
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
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
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
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
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
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
        async with asyncio.timeout(PATIENCE):
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
        async with asyncio.timeout(PATIENCE):
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
        async with asyncio.timeout(PATIENCE):
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
            async with asyncio.timeout(3 * PATIENCE), asyncio.TaskGroup() as group:
                for number in numbers:
                    group.create_task(one(number))
                if numbers.start == 0:
                    await asyncio.sleep(0.02)
                    source.make(wanted[6:])
            await asyncio.to_thread(source.wait_for_feeds, 0)

        await some(range(10))
        await asyncio.sleep(0.3)
        tenth = _left()
        for start in range(10, 100, 10):
            await some(range(start, start + 10))
        await _until(lambda: _no_more(tenth), lambda: f"after 10 fetches there were {tenth}, after 100 {_left()}")
        assert source.pinned == 0

    # Networks

    @pytest.mark.parametrize("after", [BLOCK // 2, 3 * BLOCK, 7 * BLOCK + 77])
    async def test_a_cut_is_resumed_with_what_is_missing(self, party: Party, after: int) -> None:
        source, wanted = StoreSource(), sequence(10)
        source.make(wanted)
        sink = StoreSink(wanted)
        async with TcpProxy(await self._served(party, source), Fault("cut", after)) as proxy:
            async with asyncio.timeout(PATIENCE):
                report = await party("dc-b").fetch(proxy.endpoint, subscription(wanted), sink)
            self._came_through(proxy)
        assert sink.whole, "each block came once"
        assert (report.blocks, report.resumed) == (10, 1)
        # The bytes before the cut are not blocks alone: the last one that fits may not have been whole.
        assert len(source.opened[-1].blocks) <= 10 - (after - BLOCK) // BLOCK, "it asked again for what it had"

    async def test_a_damaged_block_is_never_done(self, party: Party) -> None:
        source, wanted = StoreSource(), sequence(4)
        source.make(wanted)
        sink = StoreSink(wanted)
        async with TcpProxy(await self._served(party, source), Fault("flip", BLOCK * 3 // 2)) as proxy:
            try:
                async with asyncio.timeout(PATIENCE):
                    await party("dc-b").fetch(proxy.endpoint, subscription(wanted), sink)
            except TransferError:
                whole = False
            else:
                whole = True
            self._came_through(proxy)
        assert not sink.wrong, "a block was done with a wrong byte: it would go into the prefix cache"
        assert sink.whole or not whole

    async def test_an_emulated_line_sets_the_pace(self, party: Party) -> None:
        if not self.emulates:
            pytest.skip("the transport does not emulate lines")
        source, wanted = StoreSource(), sequence(8)
        source.make(wanted)
        line = Line(bandwidth=4e6, delay=0.05)
        endpoint = await party("dc-a", {"dc-b": line}).serve(source, HOST)
        sink = StoreSink(wanted)
        begun = now()
        async with asyncio.timeout(PATIENCE):
            await party("dc-b", {"dc-a": Line(bandwidth=4e6, delay=0.05)}).fetch(endpoint, subscription(wanted), sink)
        assert now() - begun >= 8 * BLOCK * 8 / 4e6 + 0.05, "it was faster than the line"
        assert sink.whole

    async def _served(self, party: Party, source: StoreSource) -> str:
        if not self.tcp:
            pytest.skip("the transport has no TCP connections to cut")
        endpoint = await party("dc-a").serve(source, HOST)
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            pytest.skip(f"its endpoint {endpoint} is no host:port; say so with `tcp = False`")
        return endpoint

    @staticmethod
    def _came_through(proxy: TcpProxy) -> None:
        if not proxy.count:
            pytest.skip("the fetch made no TCP connection to the endpoint; say so with `tcp = False`")


def _left() -> dict[str, int]:
    """Threads and sockets of this process. Those of the event loop's pool stay, and are not counted."""
    threads = [each for each in threading.enumerate() if not each.name.startswith("asyncio_")]
    descriptors = Path("/proc/self/fd")
    sockets = sum(path.is_socket() for path in descriptors.iterdir()) if descriptors.is_dir() else 0
    return {"threads": len(threads), "sockets": sockets}


def _no_more(than: dict[str, int]) -> bool:
    """But for what ten fetches at once may happen to need: a leak is of every fetch, or of every cancelled one."""
    gc.collect()
    return all(count <= than[what] + 10 for what, count in _left().items())


async def _until(true: Callable[[], bool], otherwise: Callable[[], str], seconds: float = 5.0) -> None:
    """Wait for what the end of threads brings about: it has no event of its own."""
    until = now() + seconds
    while not true():
        assert now() < until, otherwise()
        await asyncio.sleep(0.02)
