"""The scripted engine's native data plane: what the suite for it says, and what only this engine can be asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
from pydantic import ValidationError

from pdd_runtime.errors import Cancelled, EngineError, RequestError
from pdd_runtime.plugins.engine import Engine, ModelSpec, Offer
from pdd_runtime.testing.engine_harness import PATIENCE, EngineHarness
from pdd_runtime.testing.native_suite import NativeConformance, Pair
from pdd_runtime.testing.scripted import ScriptedEngine
from pdd_runtime.testing.scripted_config import ScriptedConfig

TOKENS = tuple(range(40, 88))


def scripted(**config: object) -> ScriptedEngine:
    settings = {"data_plane": "native", "capacity_blocks": 256, "context_length": 512} | config
    return ScriptedEngine(ScriptedConfig.model_validate(settings), ModelSpec(source="script"))


class TestLocal(NativeConformance):
    @pytest.fixture
    def giver(self) -> Engine:
        return scripted()

    @pytest.fixture
    def reader(self) -> Engine:
        return scripted()


class TestAssisted(NativeConformance):
    """With passes, steps and transfers that take time, and a batch of two."""

    @pytest.fixture
    def giver(self) -> Engine:
        return scripted(prefill_rate=50_000, batch_limit=2)

    @pytest.fixture
    def reader(self) -> Engine:
        return scripted(extend="prefill_assisted", native_rate=2e6, token_time=0.0005, batch_limit=2)


@asynccontextmanager
async def pair(giver: ScriptedEngine | None = None, reader: ScriptedEngine | None = None) -> AsyncIterator[Pair]:
    source, target = EngineHarness.started(giver or scripted()), EngineHarness.started(reader or scripted())
    async with asyncio.timeout(PATIENCE), source as one, target as other:
        yield Pair(one, other)


async def test_the_tokens_are_those_of_the_portable_engine() -> None:
    async with EngineHarness.started(scripted(data_plane="pdd")) as portable:
        first = (await portable.prefill(TOKENS)).first
        expected = await portable.generate((*TOKENS, first.id), 20)
    for extend in ("local", "prefill_assisted"):
        async with pair(reader=scripted(extend=extend)) as two:
            assert (await two.source.prefill(TOKENS)).first == first
            assert (await two.bring((*TOKENS, first.id), 20)).ids == expected


async def test_only_what_the_reader_lacks_crosses() -> None:
    async with pair() as two:
        await two.bring(TOKENS[:32], 1)
        async with two.offered(TOKENS) as offer, aclosing(two.target.receiving(TOKENS, offer)) as events:
            received = await anext(events)
            assert (received.cached, received.received) == (32, 16)
    async with pair(reader=scripted(extend="prefill_assisted")) as two:
        await two.bring(TOKENS[:32], 1)
        extended = (await two.bring(TOKENS, 1)).extended
        assert (extended.cached, extended.computed, extended.received) == (48, 0, 16)


async def test_an_offer_that_was_read_ends_by_itself() -> None:
    async with pair() as two, aclosing(two.source.offering(TOKENS)) as offers:
        await two.take(TOKENS, await anext(offers), 1)
        assert [offer async for offer in offers] == []
        await two.source.idle()


async def test_a_reader_that_comes_when_the_lease_has_run_out_is_refused() -> None:
    async with pair(scripted(lease=0.05)) as two, aclosing(two.source.offering(TOKENS)) as offers:
        offer = await anext(offers)
        with pytest.raises(EngineError, match=r"expired: no reader came in 0.05 s"):
            await anext(offers)
        await two.source.idle()
        with pytest.raises(EngineError, match="has expired, or was closed, or read before"):
            await two.take(TOKENS, offer, 1)
        await two.target.idle()


async def test_a_second_reader_of_one_offer_is_refused() -> None:
    async with pair() as two, EngineHarness.started(scripted()) as third, two.offered(TOKENS) as offer:
        await two.take(TOKENS, offer, 1)
        with pytest.raises(EngineError, match="read before"):
            await Pair(two.source, third).take(TOKENS, offer, 1)


async def test_a_transfer_that_takes_too_long_ends_on_both_sides() -> None:
    slow = scripted(native_rate=16 * 128 / 30)  # half a minute a block
    async with pair(slow) as two, aclosing(two.source.offering(TOKENS, timeout=0.3)) as offers:
        offer = await anext(offers)
        with pytest.raises(EngineError, match=r"did not come in 0.1 s"):
            await anext(two.target.receiving(TOKENS, offer, timeout=0.1))
        with pytest.raises(EngineError, match=r"reader went away|did not have all in time"):
            await anext(offers)
        await two.idle()


@pytest.mark.parametrize("who", ["offer", "reader"])
async def test_one_that_is_cancelled_in_the_midst_of_a_transfer_ends_the_other(who: str) -> None:
    slow = scripted(native_rate=16 * 128 / 30)
    async with pair(slow) as two, aclosing(two.source.offering(TOKENS, request_id="gives")) as offers:
        reading = asyncio.ensure_future(anext(two.target.receiving(TOKENS, await anext(offers), request_id="reads")))
        while (await two.target.engine.load()).sessions == 0:  # noqa: ASYNC110 - an engine has no event to wait for
            await asyncio.sleep(0.01)
        gives = asyncio.ensure_future(anext(offers))
        await asyncio.sleep(0.05)
        harness, id = (two.source, "gives") if who == "offer" else (two.target, "reads")
        await harness.engine.cancel(id)
        mine, other = (gives, reading) if who == "offer" else (reading, gives)
        with pytest.raises(Cancelled):
            await mine
        if who == "offer":
            with pytest.raises(EngineError):
                await other
        else:
            other.cancel()
        await two.idle()


async def test_offers_of_others_are_refused() -> None:
    async with pair() as two, two.offered(TOKENS) as offer:
        with pytest.raises(EngineError, match="no offer of a scripted engine"):
            await two.take(TOKENS, Offer({"host": "x"}), 1)
        with pytest.raises(EngineError, match="of another model"):
            await two.take(TOKENS, Offer({**offer.params, "model": "other"}), 1)
        with pytest.raises(EngineError, match="48 tokens are offered, and 47 asked for"):
            await two.take(TOKENS[:-1], offer, 1)
        assert (await two.take(TOKENS, offer, 1)).ids == (await two.source.generate(TOKENS, 1))


async def test_wrong_kv_is_noticed() -> None:
    """Another sequence's blocks under this one's offer."""
    async with pair() as two, two.offered(TOKENS) as offer:
        others = tuple(reversed(TOKENS))
        with pytest.raises(EngineError, match="is wrong"):
            await two.take(others, offer, 1)
        await two.target.idle()


async def test_a_keeper_that_dies_in_the_midst_is_noticed() -> None:
    slow = scripted(native_rate=16 * 128 / 30)
    async with pair(slow) as two, aclosing(two.source.offering(TOKENS)) as offers:
        reading = asyncio.ensure_future(anext(two.target.receiving(TOKENS, await anext(offers))))
        await asyncio.sleep(0.05)
        await two.source.engine.close()
        with pytest.raises(EngineError, match="could not be read"):
            await reading
        await two.target.idle()


async def test_offers_are_for_those_that_need_them() -> None:
    async with pair() as two, two.offered(TOKENS) as offer:
        events = two.target.decoding(TOKENS, 1, offer=offer)
        with pytest.raises(RequestError, match="cannot take an offer"):
            await anext(events)
    async with EngineHarness.started(scripted(extend="prefill_assisted")) as harness:
        with pytest.raises(RequestError, match="needs an offer"):
            await harness.decode(TOKENS, 1)
        assert msgspec.structs.asdict(harness.info.capabilities)["extend"] == "prefill_assisted"
    with pytest.raises(ValidationError, match="needs data_plane: native"):
        ScriptedConfig.model_validate({"extend": "prefill_assisted"})
