"""The conformance suite for engines. Subclass it in your tests and give it an engine:

```python
class TestMyEngine(EngineConformance):
    @pytest.fixture
    def engine(self) -> Engine:
        return MyEngine(MyEngine.Config(), ModelSpec(source="tiny", mode="exact"))
```

The engine is not yet started; it needs room for 64 blocks, a context of 512 tokens, and a batch of two. Capabilities
decide what is skipped.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import chain, seed
from pdd_runtime.plugins.engine import Extended, Sampling, Stopped, Tokens
from pdd_runtime.testing.engine_fault_suite import EngineFaults
from pdd_runtime.testing.engine_harness import GREEDY, PATIENCE, EngineHarness
from pdd_runtime.testing.engine_kv_suite import KvConformance
from pdd_runtime.testing.engine_sampling_suite import SamplingConformance

SEEDED = Sampling(temperature=0.8, seed=1234567)


@pytest.mark.asyncio
class EngineConformance(SamplingConformance, KvConformance, EngineFaults):
    """What every engine promises."""

    # What it is

    async def test_info_describes_the_store(self, harness: EngineHarness) -> None:
        info = harness.info
        assert info.fingerprint
        assert info.capacity_blocks == harness.store.blocks
        assert info.layout == harness.store.layout
        assert info.batch_limit >= 1
        assert info.context_length >= 1

    async def test_tokenizer_files_load(self, harness: EngineHarness) -> None:
        files = await harness.engine.tokenizer()
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
        assert tokenizer.decode(tokenizer.encode("Hello, world").ids) == "Hello, world"
        assert all(tokenizer.id_to_token(token) is not None for token in files.eos_token_ids)

    # Prefill

    @pytest.mark.parametrize("blocks", [0.5, 1, 2.5, 6])
    async def test_prefill_publishes_the_prompt_then_its_first_token(
        self, harness: EngineHarness, blocks: float
    ) -> None:
        size = harness.info.layout.block_size
        tokens = self.prompt(max(1, int(blocks * size)))
        counts = []
        async with asyncio.timeout(PATIENCE), aclosing(harness.prefilling(tokens)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    assert [token.position for token in event.tokens] == [len(tokens)]
                    break
                counts.append(event.tokens)
                here = await harness.engine.cached(tokens)
                assert here >= event.tokens // size * size, "an event spoke of blocks that were not committed"
        assert counts == sorted(set(counts))
        assert counts[-1] == len(tokens)
        assert await harness.engine.cached(tokens) == len(tokens)
        await harness.idle()

    async def test_blocks_lie_in_the_store_under_their_names(self, harness: EngineHarness) -> None:
        layout = harness.info.layout
        tokens = self.prompt(layout.block_size * 2 + 1)
        await harness.prefill(tokens, salt="tenant")
        root = seed(harness.info.fingerprint, layout.spec, salt="tenant")
        blocks = chain(root, tokens, layout.block_size)
        numbers = [harness.store.find(block.name) for block in blocks]
        assert None not in numbers
        tail = harness.store.memory(numbers[-1] or 0)
        rows = layout.elements(tail)
        assert rows[:, :, :1].any(), "the tail's token has no KV"
        assert not rows[:, :, 1:].any(), "bytes of something else stand behind the tail"

    async def test_a_second_prefill_finds_the_first(self, harness: EngineHarness) -> None:
        tokens = self.prompt(harness.info.layout.block_size * 3 + 1)
        first = await harness.prefill(tokens)
        second = await harness.prefill(tokens)
        assert first.ready[-1].cached == 0
        assert second.ready[-1].cached >= len(tokens) - 1
        if harness.info.capabilities.exact:
            assert second.first == first.first

    async def test_a_longer_prompt_reuses_the_shared_blocks(self, harness: EngineHarness) -> None:
        size = harness.info.layout.block_size
        shared = self.prompt(size * 2)
        await harness.prefill(shared + self.prompt(3, 1))
        other = await harness.prefill(shared + self.prompt(size, 2))
        assert other.ready[-1].cached >= len(shared)

    async def test_tenants_share_nothing(self, harness: EngineHarness) -> None:
        tokens = self.prompt(harness.info.layout.block_size * 2)
        await harness.prefill(tokens, salt="one")
        assert await harness.engine.cached(tokens, "one") == len(tokens)
        assert await harness.engine.cached(tokens, "two") == 0

    # Decode

    async def test_decode_after_prefill_computes_only_what_is_new(self, harness: EngineHarness) -> None:
        tokens = self.prompt(harness.info.layout.block_size * 2 + 3)
        first = (await harness.prefill(tokens)).first
        decoded = await harness.decode((*tokens, first.id), 5)
        assert decoded.extended.cached == len(tokens)
        assert decoded.extended.computed == 1
        assert decoded.stopped == Stopped("length", len(tokens) + 6)
        await harness.idle()

    async def test_extend_only_makes_no_token(self, harness: EngineHarness) -> None:
        tokens = self.prompt(harness.info.layout.block_size * 2 + 3)
        decoded = await harness.decode(tokens, 0)
        assert decoded.extended.cached == 0
        assert decoded.extended.computed == len(tokens)
        assert decoded.tokens == ()
        assert decoded.stopped == Stopped("length", len(tokens))
        assert await harness.engine.cached(tokens) == len(tokens)
        again = await harness.decode(tokens, 0)
        assert again.extended.cached >= len(tokens) - 1
        await harness.idle()

    async def test_what_was_decoded_is_cached(self, harness: EngineHarness) -> None:
        size = harness.info.layout.block_size
        tokens = self.prompt(size + 1)
        decoded = await harness.decode(tokens, size + 3)
        # The last token has been chosen, but no pass has computed its KV.
        assert await harness.engine.cached((*tokens, *decoded.ids)) >= len(tokens) + size + 2

    async def test_a_committed_tail_never_changes(self, harness: EngineHarness) -> None:
        layout = harness.info.layout
        tokens = self.prompt(layout.block_size + 1)
        await harness.prefill(tokens)
        name = chain(seed(harness.info.fingerprint, layout.spec), tokens, layout.block_size)[-1].name
        number = harness.store.find(name)
        assert number is not None
        before = bytes(harness.store.memory(number))
        await harness.generate(tokens, layout.block_size)
        assert harness.store.find(name) == number
        assert bytes(harness.store.memory(number)) == before

    async def test_a_stop_token_is_the_last_one_sent(self, harness: EngineHarness) -> None:
        tokens = self.prompt(10)
        free = await harness.generate(tokens, 8)
        sampling = Sampling(temperature=0, stop_token_ids=(free[3],))
        stopped = await harness.decode(tokens, 8, sampling)
        assert stopped.stopped.reason == "stop"
        assert stopped.ids == free[: free.index(free[3]) + 1]
        await harness.idle()

    @pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
    async def test_results_do_not_depend_on_what_was_known(self, harness: EngineHarness, sampling: Sampling) -> None:
        capabilities = harness.info.capabilities
        if not capabilities.exact or not (capabilities.position_keyed_sampling or sampling is GREEDY):
            pytest.skip("the engine does not promise it")
        size = harness.info.layout.block_size
        tokens = self.prompt(size + 5)
        whole = await harness.generate(tokens, 2 * size + 2, sampling, salt="whole")
        for known in (1, 2, size - 1, size, size + 1):
            salt = f"split-{known}"
            first = (await harness.prefill(tokens, sampling, salt=salt)).first
            assert first.id == whole[0]
            rest = await harness.generate((*tokens, *whole[:known]), len(whole) - known, sampling, salt=salt)
            assert whole[:known] + rest == whole

    async def test_seeds_differ_and_repeat(self, harness: EngineHarness) -> None:
        if not harness.info.capabilities.seeded:
            pytest.skip("the engine is not seeded")
        tokens = self.prompt(20)
        hot = [Sampling(temperature=2.0, seed=number) for number in range(4)]
        runs = [await harness.generate(tokens, 12, sampling) for sampling in hot]
        assert len(set(runs)) > 1
        if harness.info.capabilities.exact:
            assert [await harness.generate(tokens, 12, sampling) for sampling in hot] == runs

    async def test_logprobs(self, harness: EngineHarness) -> None:
        if not harness.info.capabilities.logprobs:
            pytest.skip("the engine gives no logprobs")
        tokens = self.prompt(20)
        sampling = Sampling(temperature=0, logprobs=3)
        first = (await harness.prefill(tokens, sampling)).first
        decoded = await harness.decode((*tokens, first.id), 5, sampling)
        for token in (first, *decoded.tokens):
            assert token.logprob is not None
            assert token.logprob <= 0
            assert len(token.top) == 3
            assert [value for _, value in token.top] == sorted((value for _, value in token.top), reverse=True)
            assert token.top[0][0] == token.id
            assert abs(token.top[0][1] - token.logprob) < 1e-4
        bare = await harness.decode((*tokens, first.id), 5)
        assert all(token.logprob is None and token.top == () for token in bare.tokens)

    async def test_the_hundredth_request_is_served_like_the_first(self, harness: EngineHarness) -> None:
        tokens = self.prompt(20)
        first = await harness.generate(tokens, 4)
        for which in range(98):
            await harness.generate(self.prompt(20, which + 1), 2)
        hundredth = await harness.generate(tokens, 4)
        if harness.info.capabilities.exact:
            assert hundredth == first
        await harness.idle()

    async def test_two_at_once_are_served_like_one_after_the_other(self, harness: EngineHarness) -> None:
        prompts = [self.prompt(40, 1), self.prompt(25, 2)]
        alone = [await harness.generate(tokens, 10, salt="alone") for tokens in prompts]
        together = await asyncio.gather(*(harness.generate(tokens, 10, salt="together") for tokens in prompts))
        if harness.info.capabilities.exact:
            assert together == alone
        await harness.idle()

    # Hold and seal

    async def test_held_blocks_stay_until_the_stream_is_closed(self, harness: EngineHarness) -> None:
        tokens = self.prompt(harness.info.layout.block_size + 2)
        events = harness.decoding(tokens, 3, hold=True)
        async with asyncio.timeout(PATIENCE), aclosing(events):
            await harness.collect(events)
            assert harness.store.stats.used >= 2
            harness.store.reset_cache()
            assert await harness.engine.cached(tokens) >= harness.info.layout.block_size
        await harness.idle()

    async def test_a_seal_ahead_stops_there(self, harness: EngineHarness) -> None:
        tokens = self.prompt(10)
        ahead = len(tokens) + 150
        events = harness.decoding(tokens, 300, request_id="sealed")
        async with asyncio.timeout(PATIENCE), aclosing(events):
            assert isinstance(await anext(events), Extended)
            await harness.engine.seal("sealed", ahead)
            last = [event async for event in events][-1]
        assert last == Stopped("sealed", ahead)
        await harness.idle()

    async def test_a_seal_behind_stops_at_once(self, harness: EngineHarness) -> None:
        tokens = self.prompt(10)
        events = harness.decoding(tokens, 400, request_id="sealed")
        async with asyncio.timeout(PATIENCE), aclosing(events):
            assert isinstance(await anext(events), Extended)
            first = await anext(events)
            assert isinstance(first, Tokens)
            await harness.engine.seal("sealed", len(tokens))
            last = [event async for event in events][-1]
        assert isinstance(last, Stopped)
        assert last.reason == "sealed"
        assert last.tokens < len(tokens) + 400
        await harness.idle()

    async def test_seal_and_cancel_of_what_is_not_there_do_nothing(self, harness: EngineHarness) -> None:
        for _ in range(2):
            await harness.engine.seal("nobody", 5)
            await harness.engine.cancel("nobody")

    # Ends

    async def test_drain_lets_the_running_end_and_takes_no_more(self, harness: EngineHarness) -> None:
        # Held: an engine that runs ahead of its reader may have ended it otherwise.
        events = harness.decoding(self.prompt(10), 5, hold=True)
        async with asyncio.timeout(PATIENCE), aclosing(events):
            assert isinstance(await anext(events), Extended)
            drain = asyncio.create_task(harness.engine.drain())
            await asyncio.sleep(0.01)
            with pytest.raises(EngineError):
                await harness.generate(self.prompt(5), 1)
            assert not drain.done()
            async for event in events:
                if isinstance(event, Stopped):
                    break
            assert not drain.done()
        async with asyncio.timeout(PATIENCE):
            await drain

    async def test_close_ends_the_running_and_may_come_twice(self, harness: EngineHarness) -> None:
        events = harness.decoding(self.prompt(10), 2, hold=True)
        async with asyncio.timeout(PATIENCE), aclosing(events):
            await harness.collect(events)
            await harness.engine.close()
            await harness.engine.close()
            with pytest.raises(EngineError):
                await anext(events)
        assert harness.store.stats.used == 0
