"""Promises of a worker whose engine moves its KV itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdd_runtime.errors import EngineError, TransferError
from pdd_runtime.kv import chain, seed
from pdd_runtime.plugins.engine import (
    DecodeEvent,
    DecodeRequest,
    Extended,
    Offer,
    OfferRequest,
    PrefillEvent,
    PrefillRequest,
    Received,
    ReceiveRequest,
    Sampling,
    Tokens,
)
from pdd_runtime.plugins.messages import Drain, Empty, FetchEvent, FetchRequest, WatchEvent
from tests.waiting import PATIENCE

GREEDY = Sampling(temperature=0)
PROMPT = tuple(range(40, 90))
NATIVE = (
    "spec.edges.0={from: prefill, to: main, carries: kv, link: wan}",
    "spec.pools.prefill.engine.config.data_plane=native",
    "spec.pools.main.engine.config.data_plane=native",
)


def offer(id: str = "r.main") -> OfferRequest:
    return OfferRequest(id=id, tokens=PROMPT, sampling=GREEDY, reader="main", timeout=PATIENCE)


def receive(offer: Offer) -> ReceiveRequest:
    return ReceiveRequest(id="r.kv", tokens=PROMPT, sampling=GREEDY, offer=offer, timeout=PATIENCE)


async def prefilled(connection: Any) -> int:
    """The first token behind the prompt."""
    request = PrefillRequest(id="r", tokens=PROMPT, sampling=GREEDY)
    async with connection.stream("engine.prefill", request, PrefillEvent, timeout=PATIENCE) as events:
        made = [event async for event in events if isinstance(event, Tokens)]
    return made[0].tokens[0].id


async def test_kv_goes_from_engine_to_engine_and_both_are_free_after(cluster: Any) -> None:
    giver, reader = await cluster.start("prefill", *NATIVE), await cluster.start("main", *NATIVE)
    assert giver.member.transports == {}
    assert giver.member.info.capabilities.kv == "native"
    one, other = giver._connections[0], reader._connections[0]
    first = await prefilled(one)
    async with (
        asyncio.timeout(PATIENCE),
        one.stream("engine.offer", offer(), Offer, timeout=None) as offers,
        other.stream("engine.receive", receive(await anext(offers)), Received, timeout=None) as received,
    ):
        assert await anext(received) == Received(0, len(PROMPT))
        # Read, so the offer ends; what was received is held.
        assert [event async for event in offers] == []
        assert (await reader.load()).blocks_used == 4
        assert (await reader.load()).sessions == 1
        known = (*PROMPT, first)
        decode = DecodeRequest(
            id="r", tokens=known, prompt_tokens=len(PROMPT), max_tokens=1, sampling=GREEDY, offer=None
        )
        async with other.stream("engine.decode", decode, DecodeEvent, timeout=None) as events:
            assert await anext(events) == Extended(len(PROMPT), 1, 1)
    await giver.unused()
    await reader.unused()


async def test_a_watcher_is_told_the_names_of_what_the_engine_has_cached(cluster: Any) -> None:
    worker = await cluster.start("prefill", *NATIVE)
    info = worker.member.info
    full = chain(seed(info.fingerprint, info.layout.spec), PROMPT, info.layout.block_size)[:-1]
    connection = worker._connections[0]
    async with (
        asyncio.timeout(PATIENCE),
        connection.stream("worker.watch", Empty(), WatchEvent, timeout=None) as events,
    ):
        assert (await anext(events)).added == ()
        await prefilled(connection)
        added: list[bytes] = []
        while len(added) < len(full):
            added += (await anext(events)).added
        assert added == [block.name for block in full]


async def test_it_fetches_no_blocks(cluster: Any) -> None:
    worker = await cluster.start("main", *NATIVE)
    request = FetchRequest(id="r", tokens=PROMPT, transport="tcp", endpoint="127.0.0.1:1", epoch="e", source="prefill")
    with pytest.raises(TransferError, match=r"worker main/0 cannot fetch blocks over transport tcp") as failure:
        async with worker._connections[0].stream("kv.fetch", request, FetchEvent, timeout=PATIENCE) as events:
            await anext(events)
    assert "native KV" in failure.value.why


async def test_one_with_portable_kv_offers_nothing(cluster: Any) -> None:
    worker = await cluster.start("main")
    for method, request, kind in (
        ("engine.offer", offer(), Offer),
        ("engine.receive", receive(Offer({})), Received),
    ):
        with pytest.raises(EngineError, match="scripted has portable KV"):
            async with worker._connections[0].stream(method, request, kind, timeout=PATIENCE) as events:
                await anext(events)
    await worker.unused()


@pytest.mark.parametrize("way", ["closed", "connection lost"])
async def test_an_offer_that_nobody_wants_any_more_is_freed(cluster: Any, way: str) -> None:
    worker = await cluster.start("prefill", *NATIVE)
    connection = await worker.connect()
    async with connection.stream("engine.offer", offer(), Offer, timeout=None) as offers:
        await anext(offers)
        assert (await worker.load()).blocks_used == 4
        if way == "connection lost":
            await connection.close()
    await worker.unused()


async def test_a_drain_waits_for_the_reader(cluster: Any) -> None:
    giver, reader = await cluster.start("prefill", *NATIVE), await cluster.start("main", *NATIVE)
    one, other = giver._connections[0], reader._connections[0]
    async with asyncio.timeout(PATIENCE), one.stream("engine.offer", offer(), Offer, timeout=None) as offers:
        offered = await anext(offers)
        drain = asyncio.create_task(one.call("worker.drain", Drain(PATIENCE), type(None), timeout=PATIENCE))
        await giver.state("draining")
        with pytest.raises(EngineError, match="draining"):
            async with one.stream("engine.offer", offer("late"), Offer, timeout=None) as late:
                await anext(late)
        assert not drain.done()
        async with other.stream("engine.receive", receive(offered), Received, timeout=None) as received:
            assert (await anext(received)).received == len(PROMPT)
        await drain


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (NATIVE[1:], "edges of pool main have a transport: tcp"),
        (NATIVE[:1], "an edge that carries kv has no transport"),
    ],
)
async def test_edges_that_do_not_suit_its_engine_keep_it_from_starting(
    cluster: Any, overrides: tuple[str, ...], said: str
) -> None:
    worker = await cluster.start("main", *overrides, connect=False)
    assert await worker.ended() == 3
    assert said in worker.log.read_text()
