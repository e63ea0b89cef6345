"""The scripted engine keeps the engine contract, and catches wrong KV."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pdd_runtime.errors import Cancelled, EngineError
from pdd_runtime.plugins.engine import BlocksReady, Engine, Extended, Guide, ModelSpec, Sampling
from pdd_runtime.testing.engine_harness import PATIENCE, EngineHarness, StoreHost
from pdd_runtime.testing.engine_sampling_suite import SamplingConformance
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.scripted import ScriptedEngine
from pdd_runtime.testing.scripted_config import ScriptedConfig
from pdd_runtime.testing.toy_sequence import ToySequence
from tests.waiting import until


def scripted(**config: object) -> ScriptedEngine:
    return ScriptedEngine(ScriptedConfig.model_validate(config), ModelSpec(source="script"))


class TestAtOnce(EngineConformance):
    aborts = 1000

    @pytest.fixture
    def engine(self) -> Engine:
        return scripted(capacity_blocks=256, context_length=512)


class TestSlow(EngineConformance):
    """With passes and steps that take time, other sizes, another layout, and a batch of two."""

    @pytest.fixture
    def engine(self) -> Engine:
        return scripted(
            block_size=5,
            token_bytes=48,
            dtype="bfloat16",
            kv_heads=2,
            tp_size=2,
            axes="ltkhd",
            capacity_blocks=256,
            context_length=512,
            batch_limit=2,
            chunk=7,
            prefill_rate=50_000,
            token_time=0.0005,
            alphabet="bytes",
        )


class TestLacking(SamplingConformance):
    """With every capability taken away that can be."""

    @pytest.fixture
    def engine(self) -> Engine:
        return scripted(lacks=["logprobs", "penalties", "logit_bias", "min_tokens"])


async def test_what_it_claims_it_says_and_does_not_do() -> None:
    async with EngineHarness.started(scripted(claims=["guided"])) as harness:
        assert "guided" in harness.info.capabilities.names
        guided = Sampling(temperature=0, guide=Guide(kind="regex", text="[0-9]"))
        assert await harness.generate((1, 2, 3), 8, guided) == await harness.generate((1, 2, 3), 8)


async def test_min_tokens_is_stronger_than_its_own_end_token() -> None:
    async with EngineHarness.started(scripted(eos_every=10)) as harness:
        prompt = tuple(range(40, 58))
        assert len((await harness.decode(prompt, 30, Sampling(stop_token_ids=(257,)))).ids) == 3
        longer = Sampling(stop_token_ids=(257,), min_tokens=3)
        assert len((await harness.decode(prompt, 30, longer)).ids) == 13


async def test_ten_cancelled_long_prompts_delay_the_next_by_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them are computed, eight wait for a place."""
    async with EngineHarness.started(scripted(batch_limit=2, chunk=64, prefill_rate=640)) as harness:
        chunks: list[str] = []
        compute = ToySequence.compute

        def counted(sequence: ToySequence, to: int) -> int:
            chunks.append(sequence.request_id)
            return compute(sequence, to)

        monkeypatch.setattr(ToySequence, "compute", counted)
        names = [f"long-{which}" for which in range(10)]
        streams = [harness.prefilling((which,) * 640, request_id=name) for which, name in enumerate(names)]
        readers = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await until(lambda: chunks)
        for name in names:
            await harness.engine.cancel(name)
        begun = len(chunks)
        await harness.prefill((7, 8, 9))
        assert set(chunks[begun:]) == {"test-1"}
        assert {type(end) for end in await asyncio.gather(*readers, return_exceptions=True)} <= {Cancelled, BlocksReady}
        for stream in streams:
            await stream.aclose()
        await harness.idle()


async def test_wrong_kv_fails_the_request_that_reads_it() -> None:
    async with EngineHarness.started(scripted()) as harness:
        tokens = tuple(range(40, 80))
        await harness.prefill(tokens)
        name = next(iter(harness.store.names()))
        number = harness.store.find(name)
        assert number is not None
        harness.store.memory(number)[17] ^= 1
        with pytest.raises(EngineError, match="cached KV of tokens 0 to 16 is wrong"):
            await harness.decode(tokens, 2)
        with pytest.raises(EngineError, match="wrong"):
            await harness.prefill(tokens)
        await harness.idle()


async def test_another_model_makes_other_tokens_and_names() -> None:
    async with EngineHarness.started(scripted()) as one, EngineHarness.started(scripted(vocab_size=300)) as two:
        assert one.info.fingerprint != two.info.fingerprint
        assert await one.generate(range(40, 60), 10) != await two.generate(range(40, 60), 10)


async def test_the_end_token_comes_where_the_config_says() -> None:
    async with EngineHarness.started(scripted(eos_every=8)) as harness:
        end = (await harness.engine.tokenizer()).eos_token_ids
        decoded = await harness.decode((65, 66, 67), 50, Sampling(temperature=0, stop_token_ids=end))
        assert decoded.stopped.reason == "stop"
        assert decoded.tokens[-1].position == 8


async def test_filters_keep_to_the_likeliest() -> None:
    async with EngineHarness.started(scripted()) as harness:
        greedy = await harness.generate((65, 66), 1)
        for filters in ({"top_k": 1}, {"top_p": 0.2}, {"min_p": 0.9}):
            for number in range(20):
                sampling = Sampling(temperature=1.5, seed=number, **filters)
                assert await harness.generate((65, 66), 1, sampling) == greedy


async def test_rates_take_their_time() -> None:
    loop = asyncio.get_running_loop()
    async with EngineHarness.started(scripted(prefill_rate=1000, token_time=0.01)) as harness:
        start = loop.time()
        await harness.prefill(tuple(range(50, 150)))
        assert loop.time() - start >= 0.1
        start = loop.time()
        await harness.decode(tuple(range(50, 150)), 10)
        assert loop.time() - start >= 0.1


async def test_a_cancel_ends_one_that_waits_for_its_step() -> None:
    async with EngineHarness.started(scripted(token_time=3600.0)) as harness:
        async with asyncio.timeout(PATIENCE), aclosing(harness.decoding((65, 66), 1, request_id="waits")) as events:
            assert isinstance(await anext(events), Extended)
            token = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            await harness.engine.cancel("waits")
            with pytest.raises(Cancelled):
                await token
        await harness.idle()


async def test_a_crash_is_told_to_the_host_and_ends_all() -> None:
    engine, host = scripted(crash_after=3), StoreHost()
    info = await engine.start(host)
    assert host.store is not None
    harness = EngineHarness(engine, host.store, info)
    with pytest.raises(EngineError, match="crashed after 3 tokens"):
        await harness.generate((65, 66), 5)
    assert host.failure is not None
    with pytest.raises(EngineError, match="crashed"):
        await harness.generate((65, 66), 5)
    assert host.store.stats.used == 0


async def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(EngineError, match="no weights"):
        await scripted(start_error="no weights").start(StoreHost())


@pytest.mark.parametrize("wrong", [{"kv_heads": 3}, {"tp_size": 2}, {"axes": "lkth"}])
def test_a_layout_that_cannot_be_is_no_setting(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"cannot be split|permutation"):
        ScriptedConfig.model_validate(wrong)
