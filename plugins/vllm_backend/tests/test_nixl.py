"""vLLM's own transfer as a data plane: what is asked of two servers, and what is made of their answers. The servers are
stand-ins; `test_nixl_graph.py` has real ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from pdd_vllm import nixl
from pdd_vllm.config import VllmConfig
from pdd_vllm.engine import VllmEngine

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import chain, seed
from pdd_runtime.plugins.engine import ModelSpec, Offer
from pdd_runtime.server.geometry import read_model
from pdd_runtime.testing.engine_harness import EngineHarness, StoreHost
from pdd_runtime.testing.native_suite import NativeConformance, Pair
from pdd_runtime.testing.tiny_model import write_tiny_model
from tests.waiting import PATIENCE, until

from .standin import StandIn, serving

SIZE = 16
FOR_EVER = 600.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(source=str(write_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny")))


def prompt(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(3, 200), k=n))


class Two:
    """A giver and a reader, with their servers."""

    def __init__(self, servers: tuple[StandIn, StandIn], harnesses: tuple[EngineHarness, EngineHarness]) -> None:
        self.giving, self.reading = servers
        self.giver, self.reader = harnesses
        self.pair = Pair(*harnesses)


@asynccontextmanager
async def two(model: ModelSpec, directory: Path, lease: float) -> AsyncGenerator[Two, None]:
    async with AsyncExitStack() as stack:
        fleet: dict[str, StandIn] = {}
        servers, harnesses = [], []
        for name in ("giver", "reader"):
            place = directory / name
            place.mkdir()
            servers.append(StandIn(place, fleet, lease, SIZE))
            config = await stack.enter_async_context(serving(servers[-1]))
            harnesses.append(await stack.enter_async_context(EngineHarness.started(VllmEngine(config, model))))
        yield Two((servers[0], servers[1]), (harnesses[0], harnesses[1]))


@pytest_asyncio.fixture
async def both(model: ModelSpec, tmp_path: Path) -> AsyncGenerator[Two, None]:
    async with two(model, tmp_path, FOR_EVER) as both:
        yield both


async def overwrite(both: Two) -> None:
    """Whatever the giver does not keep is others' now."""
    await both.giving.forget()
    for which in (5, 6):
        await both.giver.prefill(prompt(60 * SIZE, which))


class TestNixl(NativeConformance):
    frees_at_once = False

    @pytest_asyncio.fixture(autouse=True)
    async def engines(self, model: ModelSpec, tmp_path: Path) -> AsyncGenerator[list[VllmEngine], None]:
        async with AsyncExitStack() as stack:
            fleet: dict[str, StandIn] = {}
            engines = []
            for name in ("giver", "reader"):
                place = tmp_path / name
                place.mkdir()
                config = await stack.enter_async_context(serving(StandIn(place, fleet, 20.0, SIZE)))
                engines.append(VllmEngine(config, model))
            yield engines

    @pytest.fixture
    def giver(self, engines: list[VllmEngine]) -> VllmEngine:
        return engines[0]

    @pytest.fixture
    def reader(self, engines: list[VllmEngine]) -> VllmEngine:
        return engines[1]


async def test_the_reader_pulls_the_prompt_and_then_goes_on_by_itself(both: Two) -> None:
    tokens = prompt(3 * SIZE + 5)
    first = (await both.giver.prefill(tokens)).first
    async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
        async with aclosing(both.reader.receiving(tokens, offer)) as received:
            got = await anext(received)
        decoded = await both.reader.decode((*tokens, first.id), 3)
    assert (got.cached, got.received) == (0, len(tokens))
    assert both.reading.pulled == len(tokens)
    assert decoded.extended.cached == 3 * SIZE, "the partial block is nothing that vLLM finds again"
    assert decoded.ids == await both.giver.generate((*tokens, first.id), 3)
    prefilled, kept = both.giving.bodies[-3:-1]
    assert "kv_transfer_params" not in prefilled
    assert kept["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    pulled, went_on = both.reading.bodies[-2:]
    assert (pulled["prompt"], pulled["max_tokens"]) == (list(tokens), 1)
    assert "remote_prefill_cached_tokens" not in pulled["kv_transfer_params"]
    assert "kv_transfer_params" not in went_on
    await both.pair.idle()


async def test_only_what_is_not_there_crosses(both: Two) -> None:
    tokens = prompt(4 * SIZE)
    await both.reader.prefill(tokens[: 2 * SIZE + 3])
    await until(lambda: len(both.reader.names) == 2)
    async with (
        asyncio.timeout(PATIENCE),
        both.pair.offered(tokens) as offer,
        aclosing(both.reader.receiving(tokens, offer)) as received,
    ):
        got = await anext(received)
    assert (got.cached, got.received) == (2 * SIZE, 2 * SIZE)
    assert both.reading.pulled == 2 * SIZE


async def test_routing_sees_what_both_servers_have(both: Two) -> None:
    tokens = prompt(2 * SIZE + 1)
    await both.pair.bring(tokens, 1, salt="acme")
    layout = both.giver.info.layout
    root = seed(both.giver.info.fingerprint, layout.spec, salt="acme")
    full = {block.name for block in chain(root, tokens, SIZE)[:2]}
    await until(lambda: full <= set(both.giver.names.names()) and full <= set(both.reader.names.names()))
    assert await both.giver.engine.cached(tokens, "acme") == 2 * SIZE
    assert await both.giver.engine.cached(tokens) == 0
    await both.reading.forget()
    await until(lambda: not len(both.reader.names))


async def test_the_load_tells_of_the_server_s_own_blocks(both: Two) -> None:
    assert both.giver.info.capacity_blocks == 128
    tokens = prompt(3 * SIZE)

    async def until_used(n: int) -> None:
        while (await both.giver.engine.load()).blocks_used != n:  # noqa: ASYNC110 - it is looked at once a second
            await asyncio.sleep(0.05)

    async with asyncio.timeout(PATIENCE):
        async with both.pair.offered(tokens) as offer:
            await until_used(4)  # the prompt's, and that of the token that was made
            async with aclosing(both.reader.receiving(tokens, offer)) as received:
                await anext(received)
        await until_used(0)


# Late


async def test_the_stand_in_is_as_wrong_as_vllm_where_a_reader_is_late(model: ModelSpec, tmp_path: Path) -> None:
    """Without the engine's care: an answer like any other, and not the right one."""
    tokens = prompt(2 * SIZE + 3)
    async with two(model, tmp_path, 0.4) as both:
        first = (await both.giver.prefill(tokens)).first
        async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
            pass
        await until(lambda: not both.giving.keeps)
        await overwrite(both)
        body = {"prompt": tokens, "max_tokens": 1, "stream": False, "kv_transfer_params": offer.params["vllm"]}
        async with aiohttp.ClientSession() as session:
            answer = await session.post(f"{both.reader.engine.config.url}/v1/completions", json=body)
            assert answer.status == 200
            assert (await answer.json())["choices"][0]["token_ids"] != [first.id]
        assert both.giving.late == 1


async def test_a_reader_that_comes_after_the_lease_is_refused_and_computes(model: ModelSpec, tmp_path: Path) -> None:
    tokens = prompt(2 * SIZE + 3)
    async with two(model, tmp_path, 0.4) as both:
        first = (await both.giver.prefill(tokens)).first
        async with asyncio.timeout(PATIENCE), aclosing(both.giver.offering(tokens)) as offers:
            offer = await anext(offers)
            with pytest.raises(EngineError, match="not read the KV in its time"):
                await anext(offers)
        await until(lambda: not both.giving.keeps)
        with pytest.raises(EngineError, match="not come within its lease"):
            await both.pair.take(tokens, offer, 1)
        assert not both.reading.pulled
        assert (await both.reader.decode(tokens, 1)).ids == (first.id,)


async def test_a_pull_that_takes_too_long_fails_and_leaves_nothing_in_the_cache(
    model: ModelSpec, tmp_path: Path
) -> None:
    """Behind the lease, what is read is another's. vLLM says that it may be invalid, and answers all the same."""
    tokens = prompt(3 * SIZE + 3)
    async with two(model, tmp_path, 1.0) as both:
        first = (await both.giver.prefill(tokens)).first
        both.reading.pulling.clear()
        async with asyncio.timeout(PATIENCE), aclosing(both.giver.offering(tokens)) as offers:
            offer = await anext(offers)
            with pytest.raises(EngineError, match="not come within its lease"):
                await both.pair.take(tokens, offer, 1)
        await until(lambda: not both.giving.keeps)
        await overwrite(both)
        async with asyncio.timeout(PATIENCE), aclosing(both.giver.offering(prompt(SIZE, 9))) as offers:
            other = await anext(offers)
            both.reading.pulling.set()
            await until(lambda: both.giving.late == 1)
            # Nobody can tell whose read it was.
            with pytest.raises(EngineError, match=r"after its lease|in its time"):
                await anext(offers)
        assert other.params["vllm"]["remote_engine_id"] == both.giving.id
        assert (await both.reader.decode(tokens, 1)).ids == (first.id,)
        await both.reader.idle()


async def test_a_rise_of_late_reads_fails_every_open_offer(both: Two) -> None:
    async with (
        asyncio.timeout(PATIENCE),
        aclosing(both.giver.offering(prompt(SIZE, 1))) as one,
        aclosing(both.giver.offering(prompt(SIZE, 2))) as other,
    ):
        await anext(one)
        await anext(other)
        both.giving.late += 1
        for offers in (one, other):
            with pytest.raises(EngineError, match="it may be this one"):
                await anext(offers)
        assert (await both.pair.bring(prompt(SIZE, 3), 1)).ids, "the next one is none of them"


async def test_a_server_whose_cache_may_be_wrong_is_given_up(both: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that ended when the lease had: the clock says so, where nothing else could."""
    tokens = prompt(2 * SIZE)
    clock, pull = nixl.now, nixl.NixlPlane._pull

    async def slow(http: object, body: dict[str, object]) -> int:
        found = await pull(http, body)  # type: ignore[arg-type]
        monkeypatch.setattr(nixl, "now", lambda: clock() + 2 * FOR_EVER)
        return found

    monkeypatch.setattr(nixl.NixlPlane, "_pull", staticmethod(slow))
    async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
        with pytest.raises(EngineError, match=r"ended after its lease|within its lease"):
            await both.pair.take(tokens, offer, 1)
    with pytest.raises(EngineError, match="ended after its lease"):
        await both.reader.decode(tokens, 1)


# Not what was asked for


async def test_kv_of_other_tokens_or_of_another_tenant_is_refused(both: Two) -> None:
    tokens = prompt(2 * SIZE)
    async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
        for asked, salt in ((prompt(2 * SIZE, 1), ""), (tokens[:-1], ""), (tokens, "tenant")):
            with pytest.raises(EngineError, match="of other tokens"):
                await both.pair.take(asked, offer, 1, salt=salt)
    assert not both.reading.bodies[1:], "the server was not asked"


async def test_a_short_read_has_failed(both: Two) -> None:
    both.reading.understates = 2
    tokens = prompt(2 * SIZE)
    async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
        with pytest.raises(EngineError, match="not get all") as error:
            await both.pair.take(tokens, offer, 1)
    assert "of 32 tokens it has 30" in str(error.value)


async def test_a_giver_that_has_gone_is_a_failed_read(both: Two) -> None:
    tokens = prompt(2 * SIZE)
    async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
        del both.giving.fleet[both.giving.id]
        with pytest.raises(EngineError, match="handshake failed"):
            await both.pair.take(tokens, offer, 1)
    await both.reader.idle()


def _without(name: str) -> Callable[[Offer], Offer]:
    return lambda offer: Offer({key: value for key, value in offer.params.items() if key != name})


def _with(name: str, value: object) -> Callable[[Offer], Offer]:
    return lambda offer: Offer({**offer.params, name: value})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        *((_without(name), "no offer of a vLLM") for name in ("vllm", "of", "seconds", "ends")),
        (_with("seconds", "long"), "no offer of a vLLM"),
        (_with("ends", 0.0), "the clocks of both hosts"),
        (_with("seconds", -1.0), "within its lease"),
    ],
)
async def test_what_is_no_offer_or_a_past_one_is_refused(
    both: Two, change: Callable[[Offer], Offer], what: str
) -> None:
    tokens = prompt(SIZE)
    async with asyncio.timeout(PATIENCE), both.pair.offered(tokens) as offer:
        with pytest.raises(EngineError) as error:
            await both.pair.take(tokens, change(offer), 1)
    assert what in str(error.value)


async def test_each_start_takes_a_side_channel_of_its_own(model: ModelSpec, tmp_path: Path) -> None:
    ports = set()
    for name in ("one", "two"):
        engine = VllmEngine(VllmConfig(data_plane="nixl"), model)
        plane = engine.plane()
        assert isinstance(plane, nixl.NixlPlane)
        await plane.open(StoreHost(), read_model(Path(model.source), dtype="float32", block_size=16, tp=1), tmp_path)
        ports.add(plane.port)
        assert plane.socket == tmp_path / "agent", name
        await plane.close()
    assert len(ports) == 2
    assert nixl.DEFAULT_PORT not in ports
