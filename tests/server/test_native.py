"""Requests at a server that moves KV itself, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.kv import KvLayout, chain, seed
from pdd_runtime.plugins.engine import (
    BlocksReady,
    DecodeRequest,
    Extended,
    Offer,
    OfferRequest,
    Received,
    ReceiveRequest,
    Sampling,
    Stopped,
    Token,
    Tokens,
)
from pdd_runtime.server import native, native_request
from pdd_runtime.server.config import ServerConfig
from pdd_runtime.server.geometry import Model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.native import NativePlane
from pdd_runtime.server.native_request import NativeRequest, Passed
from pdd_runtime.server.plane import Readings
from pdd_runtime.server.request import Found, Piece
from pdd_runtime.testing.engine_harness import StoreHost
from tests.waiting import PATIENCE

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_size=4)
MODEL = Model(layout=LAYOUT, fingerprint="model", context=1000, vocab=100)
TOKENS = (1, 2, 3, 4, 5, 6)


class Plane(NativePlane):
    """One whose transfer does nothing."""

    fails: Exception | None = None
    silent = False

    async def offering(self, http: HttpClient, id: str, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        yield Offer({"id": id})
        if self.silent:
            await asyncio.Event().wait()

    async def receiving(self, http: HttpClient, id: str, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        if self.silent:
            await asyncio.Event().wait()
        yield Received(0, len(request.tokens))

    async def follow(self, http: HttpClient) -> None:
        self.names.add(b"known")
        if self.fails is not None:
            raise self.fails
        await asyncio.Event().wait()


async def plane(tmp_path: Path) -> Plane:
    made = Plane("toy", ServerConfig())
    await made.open(StoreHost(), MODEL, tmp_path)
    return made


def making(*pieces: Piece) -> Callable[[str], AsyncGenerator[Piece, None]]:
    async def generate(id: str) -> AsyncGenerator[Piece, None]:
        for piece in pieces:
            yield piece

    return generate


def token(position: int) -> tuple[Token, ...]:
    return (Token(position, 40 + position),)


async def events(request: NativeRequest | Passed) -> list[object]:
    said: list[object] = []
    async with asyncio.timeout(PATIENCE):
        while not said or not isinstance(said[-1], Stopped):
            said.append(await request.next())
    return said


async def test_a_prefill_says_what_the_server_had_once_it_is_known() -> None:
    """Some say it with their last word."""
    request = NativeRequest("r", TOKENS, making(token(6), Found(4)), cached=0, sealable=False)
    await request.prefill()
    assert await events(request) == [BlocksReady(6, 4), Tokens(token(6)), Stopped("length", 7)]


@pytest.mark.parametrize(
    ("pieces", "cached", "found"),
    [
        ((Found(5), token(6)), 0, 5),
        ((token(6), Found(5)), 4, 4),
        ((token(6),), 6, 5),
    ],
)
async def test_a_decode_says_what_was_found_as_well_as_it_is_known(
    pieces: tuple[Piece, ...], cached: int, found: int
) -> None:
    """The last known token at least is computed, where nobody says otherwise."""
    request = NativeRequest("r", TOKENS, making(*pieces), cached=cached)
    await request.decode(1, hold=False)
    assert await events(request) == [Extended(found, 6 - found, 1), Tokens(token(6)), Stopped("length", 7)]


async def test_an_extend_makes_one_token_and_drops_it() -> None:
    request = NativeRequest("r", TOKENS, making(token(6)))
    await request.decode(0, hold=False)
    assert await events(request) == [Extended(0, 6, 1), Stopped("length", 6)]


async def test_a_sealed_decode_stops_and_a_prefill_cannot_be_sealed() -> None:
    decode = NativeRequest("r", TOKENS, making(token(6), token(7), token(8)))
    decode.seal(8)
    await decode.decode(3, hold=False)
    assert (await events(decode))[-1] == Stopped("sealed", 8)
    prefill = NativeRequest("r", TOKENS, making(token(6)), sealable=False)
    prefill.seal(1)
    await prefill.prefill()
    assert (await events(prefill))[-1] == Stopped("length", 7)


async def test_a_server_that_makes_no_token_has_failed() -> None:
    for run in (NativeRequest.prefill, lambda request: request.decode(1, hold=False)):
        with pytest.raises(EngineError, match="no token"):
            await run(NativeRequest("r", TOKENS, making(Found(3))))


async def test_a_receive_stays_and_an_offer_ends(tmp_path: Path) -> None:
    ours = await plane(tmp_path)
    async with HttpClientAt() as ours._http:
        offered = ours.offer(OfferRequest(id="r", tokens=TOKENS, sampling=Sampling(), reader="main", timeout=1.0))
        await offered.run()
        assert [type(event) for event in await events(offered)] == [Offer, Stopped]
        asked = ReceiveRequest(id="r", tokens=TOKENS, sampling=Sampling(), offer=Offer({}), timeout=1.0)
        received = ours.receive(asked)
        running = asyncio.create_task(received.run())
        assert await received.next() == Received(0, 6)
        await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})


async def test_a_transfer_of_which_no_server_says_anything_ends_by_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_request, "GRACE", 0.05)
    ours = await plane(tmp_path)
    ours.silent = True
    async with HttpClientAt() as ours._http:
        offer = ours.offer(OfferRequest(id="r", tokens=TOKENS, sampling=Sampling(), reader="main", timeout=0.05))
        receive = ours.receive(
            ReceiveRequest(id="r", tokens=TOKENS, sampling=Sampling(), offer=Offer({}), timeout=0.05)
        )
        for one in (offer, receive):
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(EngineError, match="in time"):
                    await one.run()


async def test_an_offer_with_a_decode_is_refused_where_engines_extend_by_themselves(tmp_path: Path) -> None:
    ours = await plane(tmp_path)
    asked = DecodeRequest(
        id="r", tokens=TOKENS, prompt_tokens=6, max_tokens=1, sampling=Sampling(), offer=Offer({"some": "thing"})
    )
    async with HttpClientAt() as ours._http:
        request = ours.request(asked, b"root", 1, making(token(6)))
        with pytest.raises(RequestError, match="takes no offer"):
            await request.decode(1, hold=False)


async def test_what_has_just_been_cached_is_waited_for_but_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = await plane(tmp_path)
    root = seed("model", LAYOUT.spec)
    block = chain(root, TOKENS, 4)[0]
    waiting = asyncio.create_task(ours.told_of(root, TOKENS, 4))
    await asyncio.sleep(0)
    assert not waiting.done()
    ours.names.add(block.name)
    async with asyncio.timeout(PATIENCE):
        await waiting
        monkeypatch.setattr(native, "WORD_TIME", 0.01)
        await ours.told_of(root, (9, 9, 9, 9), 4)


async def test_a_server_must_say_how_many_blocks_it_has(tmp_path: Path) -> None:
    ours = await plane(tmp_path)
    async with HttpClientAt() as http:
        with pytest.raises(EngineError, match="how many blocks"):
            await ours.meet(http, reading(0), 1.0)
        await ours.close()


async def test_where_its_events_cannot_be_read_it_serves_and_nothing_is_known(tmp_path: Path) -> None:
    ours = await plane(tmp_path)
    ours.fails = ValueError("no event")
    async with HttpClientAt() as http:
        await ours.meet(http, reading(10), 1.0)
        assert ours._following is not None
        await asyncio.wait({ours._following})
        assert len(ours.names) == 0
        assert ours.blocks(Readings(1, 0, 3, 10)) == (3, 0, 7, 10)
        await ours.close()


def reading(blocks: int) -> native.Look:
    async def look() -> Readings:
        return Readings(0, 0, 0, blocks)

    return look


class HttpClientAt:
    """A client that nothing is asked of."""

    async def __aenter__(self) -> HttpClient:
        self._http = HttpClient("http://127.0.0.1:1")
        return self._http

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()
