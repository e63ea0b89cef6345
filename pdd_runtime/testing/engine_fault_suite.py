"""What every engine does when requests are cancelled, when blocks run out, and when ids come twice."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, ClassVar

import pytest

from pdd_runtime.errors import CapacityError, PddError
from pdd_runtime.plugins.engine import BlocksReady, Extended, Stopped, Tokens
from pdd_runtime.testing.engine_fixtures import EngineFixtures
from pdd_runtime.testing.engine_harness import PATIENCE, EngineHarness


@pytest.mark.asyncio
class EngineFaults(EngineFixtures):
    """A part of `EngineConformance`."""

    aborts: ClassVar[int] = 40
    """How many requests are given up in one test; a server needs a moment for each."""

    # Cancel

    @pytest.mark.parametrize(
        ("way", "events_read"), [("close", 0), ("close", 1), ("close", 3), ("cancel", 1), ("cancel", 2), ("cancel", 4)]
    )
    async def test_a_cancelled_prefill_or_decode_frees_all(
        self, harness: EngineHarness, way: str, events_read: int
    ) -> None:
        tokens = self.prompt(harness.info.layout.block_size * 4)
        for stream in (
            harness.prefilling(tokens, request_id="gone"),
            harness.decoding(tokens, 200, request_id="gone"),
            harness.decoding(tokens, 1, hold=True, request_id="gone"),
        ):
            await self._abandon(harness, stream, events_read, way)
            await harness.idle()
        assert len(await harness.generate(tokens, 2)) == 2

    @pytest.mark.parametrize("way", ["close", "cancel"])
    async def test_a_cancel_while_the_stream_waits_ends_it(self, harness: EngineHarness, way: str) -> None:
        """The caller stands in the middle of a wait for the next event: the state of every cancelled RPC."""
        events = harness.decoding(self.prompt(10), 2, hold=True, request_id="held")

        async def read() -> None:
            async with aclosing(events):
                async for _ in events:
                    pass

        reader = asyncio.create_task(read())
        await harness.until(lambda: harness.store.stats.used > 0, "the request has not begun")
        await asyncio.sleep(0.02)
        await self._end(harness, reader, way, "held")
        await harness.idle()

    async def test_a_cancel_frees_places_and_blocks_though_nobody_reads_on(self, harness: EngineHarness) -> None:
        names = [f"gone-{which}" for which in range(min(harness.info.batch_limit, 8))]
        streams = [
            harness.decoding(self.prompt(10, which), 60, hold=True, request_id=name) for which, name in enumerate(names)
        ]
        async with asyncio.timeout(PATIENCE), AsyncExitStack() as stack:
            for stream in streams:
                await stack.enter_async_context(aclosing(stream))
            await asyncio.gather(*map(anext, streams))
            for name in names:
                await harness.engine.cancel(name)
            assert len(await harness.generate(self.prompt(20), 3)) == 3
            await harness.idle()
        assert (await harness.engine.load()).sessions == 0

    async def test_aborts_at_random_moments_leave_nothing_behind(self, harness: EngineHarness) -> None:
        """In every state and every way, some sealed and some held; then all is counted."""
        assert len(await harness.generate(self.prompt(20), 2)) == 2
        await harness.idle()
        before = self._counts()
        numbers, read = iter(range(self.aborts)), Counter[type]()

        async def leave_one_after_another() -> None:
            for which in numbers:
                # Dice of its own, and every fifth to its end: what is read does not depend on who is served first.
                dice, events = random.Random(which), (0, 1, 2, 4, 1000)[which % 5]
                name, tokens = f"gone-{which}", self.prompt(dice.randrange(1, 160), which % 7)
                if dice.random() < 0.3:
                    stream: Any = harness.prefilling(tokens, request_id=name)
                else:
                    stream = harness.decoding(tokens, dice.randrange(12), hold=dice.random() < 0.4, request_id=name)
                enough = asyncio.Event()
                reader = asyncio.create_task(self.read(stream, events, enough, read))
                told = asyncio.create_task(enough.wait())
                await asyncio.wait({reader, told}, return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
                if dice.random() < 0.2:
                    await harness.engine.seal(name, len(tokens) + dice.randrange(3))
                if dice.random() < 0.5:
                    await harness.engine.cancel(name)
                if dice.random() < 0.7:
                    reader.cancel()
                await harness.engine.cancel(name)
                await asyncio.wait({reader}, timeout=PATIENCE)
                assert reader.done(), "a stream that was left does not end"

        async with asyncio.TaskGroup() as group:
            for _ in range(max(4, self.aborts // 40)):
                group.create_task(leave_one_after_another())
        await harness.idle()
        assert (await harness.engine.load()).sessions == 0
        assert {BlocksReady, Extended, Tokens, Stopped} <= set(read)
        await harness.until(lambda: self._counts() == before, "tasks or threads are left")
        assert len(await harness.generate(self.prompt(20), 2)) == 2

    @pytest.mark.parametrize("way", ["close", "cancel"])
    @pytest.mark.parametrize("waits_for", ["blocks", "a place"])
    async def test_a_cancel_of_one_that_has_not_begun_frees_all(
        self, harness: EngineHarness, waits_for: str, way: str
    ) -> None:
        """Where the store is full, or the batch; an engine that refuses it instead has nothing to free."""
        store, taken, running = harness.store, list[int](), list[asyncio.Future[tuple[int, ...]]]()
        if waits_for == "blocks":
            taken = store.allocate(store.stats.free + store.stats.cached)
        else:
            for which in range(min(harness.info.batch_limit, 16)):
                running.append(asyncio.ensure_future(harness.generate(self.prompt(10, which), 30)))
        events = harness.decoding(self.prompt(20), 3, request_id="waits")
        waiting = asyncio.ensure_future(harness.collect(events))
        await asyncio.sleep(0)
        await self._end(harness, waiting, way, "waits")
        await events.aclose()
        store.release(taken)
        assert {len(ids) for ids in await asyncio.gather(*running)} <= {30}
        await harness.idle()
        assert len(await harness.generate(self.prompt(20), 3)) == 3

    # Limits

    async def test_a_prompt_over_the_context_length_is_refused(self, harness: EngineHarness) -> None:
        limit = harness.info.context_length
        tokens = tuple(self.vocabulary[0] for _ in range(limit + 1))
        for attempt in (harness.prefill(tokens), harness.decode(tokens, 1)):
            with pytest.raises(CapacityError, match=str(limit)):
                await attempt
        await harness.idle()
        assert len(await harness.generate(self.prompt(5), 2)) == 2

    async def test_a_full_store_fails_or_delays_a_request_and_no_other(self, harness: EngineHarness) -> None:
        store = harness.store
        taken = store.allocate(store.stats.free + store.stats.cached)
        attempt = asyncio.ensure_future(harness.generate(self.prompt(20), 3))
        await asyncio.wait({attempt}, timeout=0.2)
        store.release(taken)
        try:
            assert len(await attempt) == 3
        except CapacityError:
            assert len(await harness.generate(self.prompt(20), 3)) == 3
        await harness.idle()

    async def test_a_decode_that_runs_out_of_blocks_fails_or_waits_and_leaks_nothing(
        self, harness: EngineHarness
    ) -> None:
        """Others hold the blocks that it would need in its midst. An engine with a cache of its own may do without."""
        store, size = harness.store, harness.info.layout.block_size
        tokens, n = self.prompt(size + 3), 3 * size
        alone = await harness.generate(tokens, n, salt="alone")
        taken = store.allocate(store.stats.free + store.stats.cached - 3)
        attempt = asyncio.ensure_future(harness.generate(tokens, n, salt="short"))
        await asyncio.wait({attempt}, timeout=0.3)
        if failed := attempt.done() and attempt.exception() is not None:
            with pytest.raises(CapacityError):
                attempt.result()
            await harness.until(lambda: store.stats.used == len(taken), "a request that failed has blocks")
            assert len(await harness.generate(self.prompt(5), 2)) == 2, "what fits is served, however full the store is"
        store.release(taken)
        if not failed:
            ids = await attempt
            assert ids == alone or not harness.info.capabilities.exact
            assert len(ids) == n
        await harness.idle()
        assert len(await harness.generate(tokens, n, salt="again")) == n

    async def test_too_many_for_the_blocks_are_served_or_refused_each_by_itself(self, harness: EngineHarness) -> None:
        store, size = harness.store, harness.info.layout.block_size
        taken = store.allocate(store.stats.free + store.stats.cached - 4)
        several = (harness.generate(self.prompt(2 * size + 3, which), 4) for which in range(6))
        answers = await asyncio.gather(*several, return_exceptions=True)
        served = [answer for answer in answers if not isinstance(answer, CapacityError)]
        assert served, "each of them fits alone, and none was served"
        assert [len(answer) for answer in served if not isinstance(answer, BaseException)] == [4] * len(served), answers
        await harness.until(lambda: store.stats.used == len(taken), "requests that have ended have blocks")
        store.release(taken)
        await harness.idle()
        assert len(await harness.generate(self.prompt(20), 3)) == 3

    # Ids

    async def test_requests_of_one_id_are_requests_of_their_own(self, harness: EngineHarness) -> None:
        """At once and one after another."""
        prompts = [self.prompt(30, 1), self.prompt(25, 2)]
        alone = [await harness.generate(tokens, 10, salt="alone") for tokens in prompts]

        async def same(tokens: Sequence[int]) -> tuple[int, ...]:
            events = harness.decoding(tokens, 10, request_id="same")
            async with asyncio.timeout(PATIENCE), aclosing(events):
                return (await harness.collect(events)).ids

        together = list(await asyncio.gather(*map(same, prompts)))
        after = [await same(tokens) for tokens in prompts]
        assert [len(ids) for ids in together + after] == [10] * 4
        if harness.info.capabilities.exact:
            assert together == after == alone
        await harness.idle()

    async def test_a_closed_stream_ends_no_other_of_its_id_and_a_cancel_ends_all(self, harness: EngineHarness) -> None:
        one, two, three = (
            harness.decoding(self.prompt(20, which), 20, hold=True, request_id="same") for which in range(3)
        )
        async with asyncio.timeout(PATIENCE), aclosing(one), aclosing(two), aclosing(three):
            assert isinstance(await anext(one), Extended)
            runs = asyncio.ensure_future(harness.collect(two))
            await asyncio.sleep(0)
            await one.aclose()
            assert len((await runs).ids) == 20
            await harness.collect(three)
            await harness.engine.cancel("same")
            for events in (two, three):
                with pytest.raises(PddError):
                    await anext(events)
        await harness.idle()
        events = harness.decoding(self.prompt(20), 3, request_id="same")
        async with asyncio.timeout(PATIENCE), aclosing(events):
            assert len((await harness.collect(events)).ids) == 3

    @staticmethod
    async def _end(harness: EngineHarness, reader: asyncio.Future[Any], way: str, request_id: str) -> None:
        """Of a request, by its reader or by its id."""
        if way == "close":
            reader.cancel()
        else:
            await harness.engine.cancel(request_id)
        _, pending = await asyncio.wait({reader}, timeout=PATIENCE)
        assert not pending, "the stream did not end"
        with pytest.raises((asyncio.CancelledError, PddError)):
            reader.result()

    @staticmethod
    async def _abandon(harness: EngineHarness, stream: AsyncGenerator[Any, None], events: int, way: str) -> None:
        """Read some events, then close the stream or cancel the request named `gone`."""
        async with asyncio.timeout(PATIENCE), aclosing(stream):
            for _ in range(events):
                event = await anext(stream, None)
                if event is None or isinstance(event, Stopped):
                    break
            if way == "cancel":
                await harness.engine.cancel("gone")
                # An engine that runs ahead of its reader may have ended the request before.
                with suppress(PddError):
                    async for _ in stream:
                        pass

    @staticmethod
    def _counts() -> tuple[int, int]:
        return len(asyncio.all_tasks()), threading.active_count()

    @staticmethod
    async def read(
        stream: Any, events: int = 0, enough: asyncio.Event | None = None, read: Counter[type] | None = None
    ) -> None:
        """To the end. `enough` is set when so many events have come, or the last; `read` counts their kinds."""
        enough, read = enough or asyncio.Event(), Counter() if read is None else read
        if not events:
            enough.set()
        with suppress(PddError):
            async with aclosing(stream):
                async for event in stream:
                    read[type(event)] += 1
                    events -= 1
                    if events <= 0 or isinstance(event, Stopped):
                        enough.set()
