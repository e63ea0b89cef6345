"""Who is not to be let in at the control port, or asks there for what cannot be meant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pdd_rdma.transport import RdmaTransport
from pdd_rdma.wire import FEED, TAKEN, Ask, Offer, Taken

from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.transport import Subscription
from pdd_runtime.rpc import Greeting, RpcConnection
from pdd_runtime.testing.kv_parties import LAYOUT, SECRET, StoreSink, StoreSource, sequence, subscription
from pdd_runtime.testing.strangers import Door, strangers
from tests.waiting import PATIENCE, until

Party = Callable[..., RdmaTransport]
WANTED = sequence(2)
GREETING = Greeting(graph="test", secret=SECRET, cluster="dc-b", name="dc-b/0")


async def fetched(party: Party, endpoint: str) -> None:
    store = BlockStore(LAYOUT, 8)
    sink = StoreSink(WANTED)
    await party("dc-b", store).fetch(endpoint, subscription(WANTED), sink)
    assert sink.whole


async def test_strangers_are_refused_with_a_line_in_the_log_and_others_are_served(
    party: Party, caplog: pytest.LogCaptureFixture
) -> None:
    source = StoreSource()
    source.make(WANTED)
    endpoint = await party("dc-a", source.store).serve(source, "127.0.0.1")
    door = Door(endpoint, GREETING)
    for stranger in strangers(door):
        if "no greeting" not in stranger.logs:  # Those take their time, and are the message plane's business.
            await stranger.come(door)
            await until(lambda stranger=stranger: stranger.is_in(caplog.text))
    assert SECRET not in caplog.text
    await fetched(party, endpoint)


def changed(asked: Subscription, **changes: Any) -> Subscription:
    return msgspec.structs.replace(asked, **changes)


ASKED = subscription(WANTED, deadline=0.2)
FORGED = {
    "an old epoch": changed(ASKED, epoch="epoch-0"),
    "another secret": changed(ASKED, secret="other"),
    "another model": changed(ASKED, fingerprint="other"),
    "another layout": changed(ASKED, layout=msgspec.structs.replace(LAYOUT, layers=1 << 40)),
    "no blocks": changed(ASKED, blocks=()),
    "an end that never comes": changed(ASKED, deadline=float("inf")),
    "an end that is none": changed(ASKED, deadline=float("nan")),
}


async def asked(connection: RpcConnection, subscription: Subscription) -> None:
    ask = Ask(fetch=bytes(16), subscription=subscription, checksums=True)
    async with connection.stream(FEED, ask, Offer, timeout=PATIENCE) as offers:
        async for offer in offers:
            assert not offer.blocks


@pytest.mark.parametrize("what", FORGED)
async def test_a_subscription_that_cannot_be_meant_is_refused(party: Party, what: str) -> None:
    source = StoreSource()
    source.make(WANTED)
    endpoint = await party("dc-a", source.store).serve(source, "127.0.0.1")
    connection = await Door(endpoint, GREETING).connect()
    with pytest.raises(PddError):
        await asked(connection, FORGED[what])
    await connection.close()
    assert source.pinned == 0
    await fetched(party, endpoint)


async def test_nobody_takes_what_another_was_offered_or_nobody(party: Party) -> None:
    source = StoreSource()
    source.make(WANTED)
    endpoint = await party("dc-a", source.store).serve(source, "127.0.0.1")
    mine, other = await Door(endpoint, GREETING).connect(), await Door(endpoint, GREETING).connect()
    ask = Ask(fetch=b"m" * 16, subscription=subscription(WANTED), checksums=True)
    async with mine.stream(FEED, ask, Offer, timeout=PATIENCE) as offers:
        offered: list[int] = []
        while len(offered) < 2:
            offered += [block.index for block in (await anext(offers)).blocks]
        for fetch, indices in ((b"o" * 16, [0]), (b"m" * 16, [7]), (b"m" * 16, [-1]), (b"", [])):
            with pytest.raises(TransferError):
                await other.call(TAKEN, Taken(fetch, indices), int, timeout=PATIENCE)
        assert await mine.call(TAKEN, Taken(b"m" * 16, [0, 1]), int, timeout=PATIENCE) == 2
    for connection in (mine, other):
        await connection.close()
    await asyncio.to_thread(source.wait_for_feeds, 0)
