"""What every engine with portable KV makes of KV that comes from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import Block, Conversion, Run, chain, seed
from pdd_runtime.plugins.engine import Engine, Sampling
from pdd_runtime.testing.engine_fixtures import EngineFixtures
from pdd_runtime.testing.engine_harness import GREEDY, EngineHarness


@pytest.mark.asyncio
class KvConformance(EngineFixtures):
    """A part of `EngineConformance`. Another engine is made of the same class and model, with the same settings; where
    these have a `block_size`, also with another one."""

    @pytest.mark.parametrize("cut", ["alike", "otherwise"])
    async def test_kv_of_another_instance_is_gone_on_with(
        self, engine: Engine, harness: EngineHarness, cut: str
    ) -> None:
        """Without a token of it being computed again, and to the same tokens."""
        tokens = self.prompt(3 * harness.info.layout.block_size + 5)
        first = (await harness.prefill(tokens)).first
        expected = await harness.decode((*tokens, first.id), 12)
        async with EngineHarness.started(_another(engine, cut)) as there:
            assert there.info.fingerprint == harness.info.fingerprint, "one model, two fingerprints"
            carry(harness, tokens, there, tokens)
            assert await there.engine.cached(tokens) == len(tokens)
            decoded = await there.decode((*tokens, first.id), 12)
            assert decoded.extended.cached == len(tokens)
            assert decoded.extended.computed == 1
            assert decoded.ids == expected.ids
            await there.idle()

    async def test_what_lies_in_a_block_is_what_is_computed_with(self, engine: Engine, harness: EngineHarness) -> None:
        """KV of other tokens gives another answer, or an error: nobody keeps KV beside the store."""
        size = harness.info.layout.block_size
        tokens, others = self.prompt(3 * size, 1), self.prompt(3 * size, 2)
        sampling = Sampling(temperature=0, logprobs=1) if harness.info.capabilities.logprobs else GREEDY
        first = (await harness.prefill(tokens)).first
        await harness.prefill(others)
        right = await harness.decode((*tokens, first.id), 12, sampling)
        async with EngineHarness.started(_another(engine, "alike")) as there:
            carry(harness, others, there, tokens)
            try:
                wrong = await there.decode((*tokens, first.id), 12, sampling)
            except EngineError:
                return
            assert wrong.tokens != right.tokens


def carry(source: EngineHarness, tokens: Sequence[int], target: EngineHarness, names: Sequence[int]) -> None:
    """What agents do: the blocks of `tokens` into the other store, as those of the tokens `names`, which are as many.
    Skips the test for KV that is not portable."""
    if source.info.capabilities.kv != "portable":
        pytest.skip("its KV is not portable")
    run = Run(Conversion(source.store.layout, target.store.layout), 0, len(tokens))
    blocks = _blocks(target, names)
    numbers = target.store.allocate(len(blocks))
    for block in _blocks(source, tokens):
        number = source.store.find(block.name)
        assert number is not None, "what was prefilled is not here"
        run.add(block.start, source.store.memory(number), lambda index: target.store.memory(numbers[index]))
    for block, number in zip(blocks, numbers, strict=True):
        target.store.commit(block, number)
    target.store.release(numbers)


def _blocks(harness: EngineHarness, tokens: Sequence[int]) -> list[Block]:
    layout = harness.info.layout
    return chain(seed(harness.info.fingerprint, layout.spec), tokens, layout.block_size)


def _another(engine: Engine, cut: str) -> Engine:
    config = engine.config
    if cut == "otherwise":
        size: Any = getattr(config, "block_size", None)
        if size is None:
            pytest.skip("its blocks have one size")
        config = config.model_copy(update={"block_size": 16 if size == 8 else 8})
    return type(engine)(config, engine.model)
