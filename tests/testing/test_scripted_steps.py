"""The scripted engine decodes its batch in common steps."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.testing.scripted_request import ScriptedRequest
from pdd_runtime.testing.scripted_steps import ScriptedSteps
from tests.waiting import PATIENCE


class Readers:
    """Notes who got a token in which turn of the event loop."""

    def __init__(self, steps: ScriptedSteps, *names: str) -> None:
        self.steps = steps
        self.requests = [ScriptedRequest(name) for name in names]
        self.order: list[str] = []
        self.turns: list[int] = []
        self._turn = 0

    async def read(self, counts: list[int]) -> None:
        """So many tokens of each request, in one batch."""
        turning = asyncio.create_task(self._count())
        with ExitStack() as batch:
            for request in self.requests:
                batch.enter_context(self.steps.taking(request))
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(*map(self._read, self.requests, counts))
        turning.cancel()

    async def _read(self, request: ScriptedRequest, count: int) -> None:
        for _ in range(count):
            await self.steps.next(request)
            self.order.append(request.id)
            self.turns.append(self._turn)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(0)
            self._turn += 1


async def test_a_step_gives_all_their_token_in_one_turn_of_the_loop() -> None:
    """The first one's step has begun when the others come: they are in the next."""
    readers = Readers(ScriptedSteps(0.01), "a", "b", "c")
    await readers.read([4, 3, 3])
    assert readers.order == ["a", *"abc", *"abc", *"abc"]
    first, *rest = readers.turns
    together = [rest[at : at + 3] for at in range(0, 9, 3)]
    assert [len(set(turns)) for turns in together] == [1, 1, 1]
    assert len({first, *rest}) == 4


async def test_without_a_time_all_get_theirs_in_every_turn() -> None:
    readers = Readers(ScriptedSteps(0), "a", "b")
    await readers.read([3, 3])
    assert readers.order == [*"ab", *"ab", *"ab"]


async def test_one_that_leaves_takes_nobodys_step_along() -> None:
    steps, leaves, stays = ScriptedSteps(0.01), ScriptedRequest("leaves"), ScriptedRequest("stays")
    with ExitStack() as first:
        first.enter_context(steps.taking(leaves))
        with steps.taking(stays):
            first.close()
            async with asyncio.timeout(PATIENCE):
                await steps.next(stays)


async def test_a_step_that_ends_while_its_reader_is_away_is_not_lost() -> None:
    steps, slow, other = ScriptedSteps(0.01), ScriptedRequest("slow"), ScriptedRequest("other")
    with steps.taking(slow), steps.taking(other):
        await steps.next(other)
        reading = asyncio.ensure_future(steps.next(slow))
        await asyncio.sleep(0)
        assert reading.done()


@pytest.mark.parametrize("seconds", [0, 3600.0])
async def test_one_that_is_stopped_does_not_wait_for_its_step(seconds: float) -> None:
    steps, request = ScriptedSteps(seconds), ScriptedRequest("stopped")
    with steps.taking(request):
        reading = asyncio.ensure_future(steps.next(request))
        request.stop(EngineError("enough"))
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineError, match="enough"):
                await reading
