"""What engines in the worker's process add to the conformance suite: how their passes are shared, and what a pass that
fails, or does not end, does to whom. Put it before `EngineConformance`:

```python
class TestMyEngine(InProcessFaults, EngineConformance): ...
```

It needs a token budget of at least 32, and blocks for a thousand tokens.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pdd_runtime.errors import CapacityError, EngineError
from pdd_runtime.inprocess import Chunk, InProcessEngine
from pdd_runtime.testing.engine_fault_suite import EngineFaults
from pdd_runtime.testing.engine_harness import PATIENCE, EngineHarness


class Tapped:
    """The passes of an engine, each as its chunks, in the order of their beginning."""

    def __init__(
        self, harness: EngineHarness, before: Callable[[Sequence[Chunk]], object] = lambda chunks: None
    ) -> None:
        """`before` is called in the model's thread; what it raises the pass raises."""
        engine = harness.engine
        assert isinstance(engine, InProcessEngine)
        self.passes: list[Sequence[Chunk]] = []
        self._before, self._step = before, engine.runner.step
        engine.runner.step = self._tapped  # type: ignore[method-assign]

    def _tapped(self, chunks: Sequence[Chunk]) -> Any:
        self.passes.append(chunks)
        self._before(chunks)
        return self._step(chunks)


class Gate:
    """Holds the pass of a number, and those behind it, until it is opened."""

    def __init__(self, harness: EngineHarness, number: int) -> None:
        self._go, self._number = threading.Event(), number
        self.open = self._go.set
        self.tapped = Tapped(harness, self._pause)

    async def reached(self, harness: EngineHarness) -> None:
        await harness.until(lambda: len(self.tapped.passes) > self._number, "so many passes were not computed")

    def _pause(self, chunks: Sequence[Chunk]) -> None:
        if len(self.tapped.passes) > self._number:
            self._go.wait()


def _begins(chunk: Chunk, tokens: Sequence[int]) -> bool:
    return chunk.start == 0 and chunk.tokens == tuple(tokens[: len(chunk.tokens)])


@pytest.mark.asyncio
class InProcessFaults(EngineFaults):
    """On top of `EngineConformance`."""

    aborts = 1000

    # Who waits for whom

    @pytest.mark.parametrize("way", ["close", "cancel"])
    async def test_ten_cancelled_long_prompts_delay_the_next_by_the_pass_under_way(
        self, harness: EngineHarness, way: str
    ) -> None:
        """Some of the ten are computed, some wait for blocks."""
        gate, short = Gate(harness, 2), self.prompt(6, 99)
        names = [f"long-{which}" for which in range(10)]
        readers = [
            asyncio.create_task(self.read(harness.prefilling(self.prompt(300, which), request_id=name)))
            for which, name in enumerate(names)
        ]
        await gate.reached(harness)
        assert (await harness.engine.load()).running + (await harness.engine.load()).waiting == 10
        for reader, name in zip(readers, names, strict=True):
            if way == "cancel":
                await harness.engine.cancel(name)
            else:
                reader.cancel()
        following = asyncio.create_task(harness.generate(short, 2))
        await asyncio.sleep(0)
        gate.open()
        assert len(await following) == 2
        assert [len(chunks) for chunks in gate.tapped.passes[3:]] == [1, 1], "who had left was computed"
        assert _begins(gate.tapped.passes[3][0], short)
        await asyncio.wait(readers)
        await harness.idle()

    async def test_a_short_prompt_is_computed_beside_the_long_one_before_it(self, harness: EngineHarness) -> None:
        gate, short = Gate(harness, 0), self.prompt(6, 2)
        reader = asyncio.create_task(harness.prefill(self.prompt(400, 1)))
        await gate.reached(harness)
        following = asyncio.create_task(harness.generate(short, 1))
        await asyncio.sleep(0)
        gate.open()
        assert len(await following) == 1
        await reader
        first, second, *more = gate.tapped.passes
        assert more, "the long one is computed in too few passes to tell"
        assert [len(first), len(second), *map(len, more)] == [1, 2, *[1] * len(more)]
        assert sum(len(chunk.tokens) for chunk in second) == len(first[0].tokens), "the long one gives too much way"
        await harness.idle()

    # Memory

    async def test_who_alone_has_no_memory_for_its_pass_fails_and_no_other(self, harness: EngineHarness) -> None:
        prompts, bad = [self.prompt(20, which) for which in range(3)], self.prompt(30, 9)
        alone = [await harness.generate(tokens, 12, salt="alone") for tokens in prompts]
        numbers = set[int]()

        def refuse(chunks: Sequence[Chunk]) -> None:
            numbers.update(chunk.sequence for chunk in chunks if _begins(chunk, bad))
            if numbers & {chunk.sequence for chunk in chunks}:
                raise MemoryError("no more")

        Tapped(harness, refuse)
        *answers, failed = await asyncio.gather(
            *(harness.generate(tokens, 12) for tokens in prompts), harness.generate(bad, 12), return_exceptions=True
        )
        assert isinstance(failed, CapacityError), failed
        assert [len(ids) for ids in answers if not isinstance(ids, BaseException)] == [12] * 3, answers
        if harness.info.capabilities.exact:
            assert answers == alone
        await harness.idle()
        assert harness.failure is None
        assert len(await harness.generate(self.prompt(10), 3)) == 3

    async def test_a_pass_that_is_too_large_is_computed_in_parts(self, harness: EngineHarness) -> None:
        prompts = [self.prompt(20, which) for which in range(3)]
        failures = 0

        def refuse(chunks: Sequence[Chunk]) -> None:
            nonlocal failures
            if len(chunks) > 1:
                failures += 1
                raise MemoryError("so much at once")

        Tapped(harness, refuse)
        answers = await asyncio.gather(*(harness.generate(tokens, 8) for tokens in prompts))
        assert [len(ids) for ids in answers] == [8] * 3
        assert failures
        await harness.idle()

    async def test_an_engine_whose_passes_all_fail_says_so_and_ends_every_request(self, harness: EngineHarness) -> None:
        def refuse(chunks: Sequence[Chunk]) -> None:
            raise RuntimeError("the device is lost")

        Tapped(harness, refuse)
        for which in range(3):
            with pytest.raises(EngineError, match="device is lost"):
                await harness.generate(self.prompt(10, which), 3)
        await harness.until(lambda: harness.failure is not None, "it has not said that it has failed")
        assert "device is lost" in str(harness.failure)
        with pytest.raises(EngineError, match="in a row have failed"):
            await harness.generate(self.prompt(10), 3)
        await harness.idle()

    async def test_a_pass_that_hangs_ends_the_engine_with_where_it_hangs(
        self, harness: EngineHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        go, engine = threading.Event(), harness.engine
        assert isinstance(engine, InProcessEngine)
        engine.passes.step_timeout = 1.5

        def hang_in_the_model(chunks: Sequence[Chunk]) -> None:
            go.wait()

        try:
            Tapped(harness, hang_in_the_model)
            requests = [asyncio.create_task(harness.generate(self.prompt(10, which), 3)) for which in range(2)]

            async def lively() -> object:
                return None if (await engine.load()).silent else "its load says nothing"

            await harness.eventually(lively, "no sign that a pass takes long")
            await harness.until(lambda: harness.failure is not None, "the pass is not noticed")
            ended = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), PATIENCE)
            assert all(isinstance(end, EngineError) for end in ended), ended
            assert "1.5 s" in str(harness.failure)
            assert "hang_in_the_model" in caplog.text
            with pytest.raises(EngineError, match="has not ended"):
                await harness.generate(self.prompt(10), 3)
        finally:
            go.set()
