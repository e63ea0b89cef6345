"""SGLang's own transfer, against stand-ins: what the plane makes of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import pytest_asyncio
from pdd_sglang.config import NOBODY, SglangConfig
from pdd_sglang.engine import SglangEngine

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import Engine, ModelSpec, Offer, Received
from pdd_runtime.testing.engine_harness import PATIENCE, EngineHarness
from pdd_runtime.testing.native_suite import NativeConformance, Pair
from pdd_runtime.testing.tiny_model import write_tiny_model
from plugins.sglang_backend.tests.standin import NO_ROOM, Fabric, StandIn, answer

PAGE = 16


def tokens(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(3, 200), k=n))


class Servers(NamedTuple):
    prefill: StandIn
    decode: StandIn
    fabric: Fabric
    giver: SglangEngine
    reader: SglangEngine


def engine(url: str, socket: Path, model: ModelSpec, role: Role, **config: Any) -> SglangEngine:
    made = SglangEngine(
        SglangConfig(url=url, socket=socket, data_plane="mooncake", batch_limit=8, start_timeout="60s", **config), model
    )
    made.role = role
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(source=str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")))


@pytest_asyncio.fixture
async def servers(tmp_path: Path, model: ModelSpec) -> AsyncGenerator[Servers, None]:
    fabric = Fabric()
    places = [tmp_path / name for name in ("p", "d")]
    for place in places:
        place.mkdir()
    prefill, decode = StandIn("prefill", fabric, places[0] / "s"), StandIn("decode", fabric, places[1] / "s")
    async with prefill.listening() as there, decode.listening() as here:
        giver = engine(there, places[0] / "s", model, "prefill")
        yield Servers(prefill, decode, fabric, giver, engine(here, places[1] / "s", model, "main"))


class TestNative(NativeConformance):
    @pytest.fixture
    def giver(self, servers: Servers) -> Engine:
        return servers.giver

    @pytest.fixture
    def reader(self, servers: Servers) -> Engine:
        return servers.reader


@pytest_asyncio.fixture
async def pair(servers: Servers) -> AsyncGenerator[Pair, None]:
    async with AsyncExitStack() as stack:
        giver = await stack.enter_async_context(EngineHarness.started(servers.giver, "prefill"))
        reader = await stack.enter_async_context(EngineHarness.started(servers.reader, "main"))
        yield Pair(giver, reader)


async def received(pair: Pair, known: tuple[int, ...]) -> Received:
    async with (
        asyncio.timeout(PATIENCE),
        pair.offered(known) as offer,
        aclosing(pair.target.receiving(known, offer)) as events,
    ):
        return await anext(events)


async def known(pair: Pair, prompt: tuple[int, ...], blocks: int) -> None:
    """Return when both engines know that so many blocks of it are there."""
    for harness in (pair.source, pair.target):
        await harness.eventually(
            lambda harness=harness: missing(harness, prompt, blocks),  # type: ignore[misc]
            "names are missing",
        )


async def missing(harness: EngineHarness, prompt: tuple[int, ...], blocks: int) -> int | None:
    there = await harness.engine.cached(prompt) // PAGE
    return None if there >= blocks else there


# Prefill


async def test_a_prompt_is_computed_once_whoever_reads_it(servers: Servers, pair: Pair) -> None:
    """A first token needs no reader, and SGLang keeps no KV of a request without one."""
    prompt, before = tokens(5 * PAGE + 3), servers.prefill.computed
    prefilled = await pair.source.prefill(prompt)
    assert prefilled.first.id == answer(prompt, 1)[0]
    assert prefilled.ready[-1].cached == 0
    # The rest of a page is in no cache: it is computed for each.
    assert servers.prefill.computed == before + len(prompt) + 3
    assert await received(pair, prompt) == Received(0, len(prompt))
    assert servers.prefill.computed == before + len(prompt) + 3 + 3
    assert (await pair.source.prefill(prompt)).ready[-1].cached == 5 * PAGE
    await pair.idle()


async def test_a_first_token_comes_where_nobody_tells_what_is_cached(servers: Servers, pair: Pair) -> None:
    servers.prefill.publishes = False
    prompt = tokens(3 * PAGE)
    assert (await pair.source.prefill(prompt)).first.id == answer(prompt, 1)[0]
    await pair.source.idle()


async def test_a_prefill_that_is_closed_while_it_computes_leaves_nothing(servers: Servers, pair: Pair) -> None:
    servers.prefill.may_compute.clear()
    stream = pair.source.prefilling(tokens(2 * PAGE))
    waiting = asyncio.ensure_future(anext(stream))
    await pair.source.eventually(lambda: idle_server(servers.prefill), "the server has no request")
    waiting.cancel()
    await asyncio.wait({waiting})
    await stream.aclose()
    await pair.source.eventually(lambda: busy_server(servers.prefill), "the server has a request")


async def idle_server(server: StandIn) -> bool | None:
    return True if server.used == 0 else None


async def busy_server(server: StandIn) -> int | None:
    return server.used or None


# From one to the other


async def test_only_what_the_reader_lacks_is_moved(servers: Servers, pair: Pair) -> None:
    prompt = tokens(4 * PAGE + 5)
    assert await received(pair, prompt) == Received(0, len(prompt))
    assert servers.fabric.moved == 5 * PAGE
    await known(pair, prompt, 4)
    decoded = await pair.bring((*prompt, 7), 40)
    assert decoded.ids == answer((*prompt, 7), 40)
    assert (decoded.extended.computed, decoded.extended.received) == (0, 6)
    assert servers.fabric.moved == 6 * PAGE
    # What the reader has made since need not come again.
    whole = (*prompt, 7, *decoded.ids)
    await known(pair, whole[: 6 * PAGE], 4)
    await pair.target.eventually(lambda: missing(pair.target, whole, 6), "names are missing")
    assert (await pair.bring(whole, 3)).ids == answer(whole, 3)
    assert servers.fabric.moved == 7 * PAGE
    await pair.idle()


async def test_tenants_do_not_find_each_other_s_kv(servers: Servers, pair: Pair) -> None:
    prompt = tokens(2 * PAGE)
    for salt in ("one", "two"):
        before = servers.fabric.moved
        assert (await pair.bring(prompt, 2, salt=salt)).ids == answer(prompt, 2)
        assert servers.fabric.moved == before + 2 * PAGE


async def test_servers_that_name_one_room_are_not_told_that_their_tokens_differ(servers: Servers, pair: Pair) -> None:
    """Why an offer has a digest: the real ones answer 200 as well, and wrong."""
    mine, others = tokens(2 * PAGE, 1), tokens(2 * PAGE, 2)
    request = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.prefill.bootstrap, "bootstrap_room": 5}
    request |= {"sampling_params": {"max_new_tokens": 2}, "stream": True}
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        bodies = [request | {"rid": "p", "input_ids": others}, request | {"rid": "d", "input_ids": mine}]
        urls = [servers.giver.config.url, servers.reader.config.url]
        answers = await asyncio.gather(
            *(http.post(f"{url}/generate", json=body) for url, body in zip(urls, bodies, strict=True))
        )
    assert [reply.status_code for reply in answers] == [200, 200]
    assert f'"output_ids": [{answer(mine, 1)[0]}]' not in answers[1].text


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"host": None}, "Expected `str`"),
        ({"host": NOBODY}, "without a prefill server"),
        ({"host": "a b"}, "matching"),
        ({"room": "7"}, "Expected `int`"),
        ({"room": -1}, ">= 0"),
        ({"room": 2**63}, "<"),
        ({"port": 0}, ">= 1"),
        ({"digest": "00"}, "other KV"),
        ({"more": 1}, "unknown field"),
    ],
)
async def test_a_bad_offer_never_reaches_the_server(
    servers: Servers, pair: Pair, changed: dict[str, Any], why: str
) -> None:
    """A decode server's scheduler ends by a request without a host."""
    prompt = tokens(PAGE)
    async with asyncio.timeout(PATIENCE), pair.offered(prompt) as offer:
        bad = Offer(offer.params | changed)
        with pytest.raises(EngineError, match=why):
            await pair.take(prompt, bad, 1)
        with pytest.raises(EngineError, match=why):
            await anext(pair.target.receiving(prompt, bad))
        assert not servers.decode.dead
        assert (await pair.take(prompt, offer, 2)).ids == answer(prompt, 2)


@pytest.mark.parametrize("other", ["tokens", "tenant", "length"])
async def test_an_offer_of_other_kv_is_refused(pair: Pair, other: str) -> None:
    prompt = tokens(2 * PAGE)
    wanted = {"tokens": tokens(2 * PAGE, 1), "length": prompt[:-1]}.get(other, prompt)
    async with asyncio.timeout(PATIENCE), pair.offered(prompt) as offer:
        with pytest.raises(EngineError, match="other KV"):
            await pair.take(wanted, offer, 1, salt="other" if other == "tenant" else "")


async def test_each_server_has_one_part(pair: Pair) -> None:
    prompt = tokens(PAGE)
    with pytest.raises(EngineError, match="does not do that"):
        await pair.target.prefill(prompt)
    with pytest.raises(EngineError, match="does not do that"):
        await anext(pair.target.offering(prompt))
    with pytest.raises(EngineError, match="does not do that"):
        await pair.source.decode(prompt, 1)


async def test_a_reader_that_nobody_serves_says_so(pair: Pair) -> None:
    """The server gives it up, when its time is over."""
    prompt = tokens(PAGE)
    async with asyncio.timeout(PATIENCE):
        async with pair.offered(prompt) as offer:
            pass
        with pytest.raises(EngineError, match="Decode transfer failed"):
            await anext(pair.target.receiving(prompt, offer))
        await pair.idle()


async def test_an_offer_that_nobody_reads_ends_with_an_error(pair: Pair) -> None:
    offers = pair.source.offering(tokens(PAGE))
    async with asyncio.timeout(PATIENCE), aclosing(offers):
        await anext(offers)
        with pytest.raises(EngineError, match="Prefill bootstrap failed"):
            await anext(offers)


# The server


@pytest.mark.parametrize(
    ("side", "setting", "value", "flag"),
    [
        ("prefill", "disaggregation_mode", "decode", "--disaggregation-mode prefill"),
        ("prefill", "optimistic_prefill_attempts", 0, "--optimistic-prefill-attempts"),
        ("prefill", "page_size", 1, "--page-size 16"),
        ("prefill", "kv_events_config", None, "--kv-events-config"),
        ("decode", "disaggregation_mode", "null", "--disaggregation-mode decode"),
        ("decode", "disaggregation_transfer_backend", "nixl", "--disaggregation-transfer-backend mooncake"),
        ("decode", "disaggregation_decode_enable_radix_cache", False, "--disaggregation-decode-enable-radix-cache"),
        ("decode", "disaggregation_decode_allocation_policy", "prefill_complete", "allocation-policy"),
        ("decode", "incremental_streaming_output", False, "--incremental-streaming-output"),
        ("decode", "dp_size", 2, "--dp-size"),
    ],
)
async def test_a_server_that_was_started_otherwise_is_refused(
    servers: Servers, side: str, setting: str, value: object, flag: str
) -> None:
    server, made = (servers.prefill, servers.giver) if side == "prefill" else (servers.decode, servers.reader)
    server.info[setting] = value
    with pytest.raises(EngineError, match="started otherwise") as caught:
        async with EngineHarness.started(made, made.role):
            pass
    assert flag in caught.value.fix
    assert setting in caught.value.why


async def test_what_a_server_had_cached_before_we_came_is_forgotten(
    servers: Servers, pair: Pair, tmp_path: Path
) -> None:
    """Its events are gone: nobody could say what of it is there."""
    prompt = tokens(3 * PAGE)
    await pair.bring(prompt, 2)
    assert servers.decode.cache
    await pair.target.engine.close()
    again = engine(str(servers.reader.config.url), tmp_path / "d" / "s", servers.reader.model, "main")
    async with EngineHarness.started(again, "main") as harness:
        assert not servers.decode.cache
        assert await harness.engine.cached(prompt) == 0


async def test_stand_ins_refuse_what_the_real_ones_refuse(servers: Servers) -> None:
    body = {"rid": "r", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "stream": True}
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        for made in (servers.giver, servers.reader):
            reply = await http.post(f"{made.config.url}/generate", json=body)
            assert (reply.status_code, NO_ROOM in reply.text) == (400, True)
        with pytest.raises(httpx.HTTPError):
            await http.post(f"{servers.reader.config.url}/generate", json=body | {"bootstrap_room": 1})
        assert (await http.get(f"{servers.reader.config.url}/ready")).status_code == 503
