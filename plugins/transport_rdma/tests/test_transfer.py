"""What a transfer brings when nothing goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from pdd_rdma.config import RdmaConfig
from pdd_rdma.transport import RdmaTransport
from rdma_peer import LARGE
from rdma_processes import line, peer

from pdd_runtime.errors import TransferError
from pdd_runtime.kv import BlockStore
from pdd_runtime.rpc import Line
from pdd_runtime.testing.kv_parties import LAYOUT, Context, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.tcp_proxy import TcpProxy

Party = Callable[..., RdmaTransport]
HOST = "127.0.0.1"


@pytest.mark.parametrize("tls", ["all", "tcp"])
@pytest.mark.parametrize("checksums", [True, False])
async def test_blocks_land_in_the_workers_own_memory(party: Party, tls: str, checksums: bool) -> None:
    wanted = sequence(40, LARGE)
    source, sink = StoreSource(LARGE, 40), StoreSink(wanted, LARGE)
    endpoint = await party("dc-a", source.store, tls=tls).serve(source, HOST)
    receiver = party("dc-b", sink.store, tls=tls, checksums=checksums)
    async with asyncio.TaskGroup() as group:
        transfer = group.create_task(receiver.fetch(endpoint, subscription(wanted, layout=LARGE), sink))
        for start in range(0, 40, 13):
            source.make(wanted[start : start + 13])
            await asyncio.sleep(0)
    assert sink.whole
    assert (transfer.result().blocks, transfer.result().resumed) == (40, 0)


@pytest.mark.parametrize(
    ("tls", "endpoint", "checksums"),
    [
        ("", "10.0.0.7:9000", False),
        ("rc", "10.0.0.7:9000", False),
        ("^ib", "10.0.0.7:9000", True),
        ("all", "10.0.0.7:9000", True),
        ("all", "127.0.0.1:9000", False),
        ("all", "[::1]:9000", False),
        ("all", "there.example:9000", True),
        ("tcp", "127.0.0.1:9000", True),
    ],
)
def test_blocks_have_checksums_where_they_may_go_over_tcp(tls: str, endpoint: str, checksums: bool) -> None:
    assert RdmaConfig(tls=tls).hashes(endpoint) is checksums
    assert RdmaConfig(tls=tls, checksums=not checksums).hashes(endpoint) is not checksums


class Scattered(StoreSink):
    """Every third block lands beside the store, in memory that is given back as soon as the fetch has ended."""

    def __init__(self, wanted: list[object]) -> None:
        super().__init__(wanted)  # type: ignore[arg-type]
        self.beside = {index: bytearray(LAYOUT.block_bytes) for index in range(0, len(wanted), 3)}

    def memory(self, index: int) -> memoryview:
        return memoryview(self.beside[index]) if index in self.beside else super().memory(index)


async def test_blocks_that_land_beside_the_store_are_registered_for_the_fetch(party: Party) -> None:
    source, wanted = StoreSource(), sequence(20)
    source.make(wanted)
    store = BlockStore(LAYOUT, 20)
    endpoint, receiver = await party("dc-a", source.store).serve(source, HOST), party("dc-b", store)
    for number in range(5):
        sink = Scattered(wanted)  # type: ignore[arg-type]
        sink.store = store
        await receiver.fetch(endpoint, subscription(wanted, request_id=f"req-{number}"), sink)
        assert sink.whole


async def test_one_connection_serves_all_fetches_from_a_peer(party: Party) -> None:
    source, wanted = StoreSource(), sequence(8)
    source.make(wanted)
    receiver = party("dc-b")
    async with TcpProxy(await party("dc-a", source.store).serve(source, HOST)) as proxy:
        for turn in range(5):
            sinks = [StoreSink(wanted) for _ in range(3)]
            async with asyncio.TaskGroup() as group:
                for number, sink in enumerate(sinks):
                    asked = subscription(wanted, request_id=f"req-{turn}-{number}")
                    group.create_task(receiver.fetch(proxy.endpoint, asked, sink))
            assert all(sink.whole for sink in sinks)
        assert proxy.count == 1


@pytest.mark.parametrize("tls", ["all", "tcp"])
async def test_separate_processes(party: Party, tls: str) -> None:
    """Both ways: this process fetches from another one, which fetches from this one."""
    wanted = sequence(8, LARGE)
    source, sink = StoreSource(LARGE, 8), StoreSink(wanted, LARGE)
    source.make(wanted)
    ours = await party("dc-a", source.store, tls=tls).serve(source, HOST)
    async with peer("serve", tls, 8) as (_, theirs), peer("fetch", tls, 8, ours) as (fetching, first):
        await party("dc-b", sink.store, tls=tls).fetch(theirs, subscription(wanted, layout=LARGE), sink)
        assert sink.whole
        assert first == "first"
        assert await line(fetching) == "ok"


async def test_nothing_wanted_is_nothing_done(party: Party) -> None:
    report = await party("dc-b").fetch("127.0.0.1:1", subscription([]), StoreSink([]))
    assert (report.bytes, report.blocks, report.gone) == (0, 0, 0)


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:http", "rdma=127.0.0.1"])
async def test_an_endpoint_that_is_none_is_refused(party: Party, endpoint: str) -> None:
    with pytest.raises(TransferError, match="is no endpoint"):
        await party("dc-b").fetch(endpoint, subscription(sequence(1)), StoreSink(sequence(1)))


async def test_an_emulated_link_is_refused_with_what_to_do(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    context = Context("dc-a", {"dc-b": Line(bandwidth=1e9, delay=0.01)}, memory=source.store.buffer())
    sender = RdmaTransport(RdmaConfig(tls="all"), context)
    try:
        endpoint = await sender.serve(source, HOST)
        with pytest.raises(TransferError, match="does not emulate the link to dc-b") as refused:
            await party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted))
        assert "transport tcp" in refused.value.fix
    finally:
        await sender.close()


async def test_a_stranger_is_refused(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    endpoint = await party("dc-a", source.store).serve(source, HOST)
    stranger = Context("dc-b")
    stranger.greeting = msgspec.structs.replace(stranger.greeting, secret="guessed")
    receiver = RdmaTransport(RdmaConfig(tls="all"), stranger)
    try:
        with pytest.raises(TransferError, match="do not share a secret"):
            await receiver.fetch(endpoint, subscription(wanted), StoreSink(wanted))
    finally:
        await receiver.close()
