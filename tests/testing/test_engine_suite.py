"""The engine suite finds engines that break the contract where nothing goes as it should."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pdd_runtime.errors import CapacityError
from pdd_runtime.plugins.engine import DecodeEvent, DecodeRequest, Engine, EngineHost, EngineInfo, ModelSpec
from pdd_runtime.testing import engine_fault_suite, engine_harness
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.scripted import ScriptedEngine
from pdd_runtime.testing.toy_sequence import ToySequence
from tests.testing.outcomes import ran


class Suite(EngineConformance):
    """With steps that take time, and a batch of two."""

    @pytest.fixture
    def engine(self) -> Engine:
        config = {"capacity_blocks": 64, "context_length": 512, "batch_limit": 2, "token_time": 0.0005}
        return self.plugin(ScriptedEngine.Config.model_validate(config), ModelSpec(source="script"))

    plugin: type[Engine]


class Leaky(ScriptedEngine):
    """Keeps a block of each request for which there was no room."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        blocks = self._store.allocate(1)
        try:
            async for event in super().decode(request):
                yield event
        except CapacityError:
            blocks = []
            raise
        finally:
            self._store.release(blocks)


class Fragile(ScriptedEngine):
    """Breaks down where blocks run out."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        try:
            async for event in super().decode(request):
                yield event
        except CapacityError:
            await self.close()
            raise


class Successor(ScriptedEngine):
    """Takes a request whose id it knows for the same one come again, and ends the first."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        await self.cancel(request.id)
        async for event in super().decode(request):
            yield event


class Careless(ScriptedEngine):
    """With one stream it closes all of that id."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        try:
            async for event in super().decode(request):
                yield event
        finally:
            await self.cancel(request.id)


class Deaf(ScriptedEngine):
    """Cancels only what has a place in the batch."""

    def _named(self, request_id: str) -> list[Any]:
        return [request for request in super()._named(request_id) if request.admitted]


class Stranger(ScriptedEngine):
    """Each instance is a model of its own."""

    _number = itertools.count()

    async def start(self, host: EngineHost) -> EngineInfo:
        self.model = self.model.model_copy(update={"source": f"script {next(self._number)}"})
        return await super().start(host)


class Distrustful(ScriptedEngine):
    """Computes again what another has computed."""

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        if not self._made:
            self._store.reset_cache()
        async for event in super().decode(request):
            yield event


class Hermit(ScriptedEngine):
    """Its KV is its own: what lies in the blocks is nothing to it. Its test takes its look at them away."""


MODULE = """
from tests.testing.test_engine_suite import Suite, {} as Plugin


class TestIt(Suite):
    plugin = Plugin


del Suite
"""
OUT = "test_a_decode_that_runs_out_of_blocks_fails_or_waits_and_leaks_nothing"
MANY = "test_too_many_for_the_blocks_are_served_or_refused_each_by_itself"
IDS = "test_requests_of_one_id_are_requests_of_their_own"
CLOSED = "test_a_closed_stream_ends_no_other_of_its_id_and_a_cancel_ends_all"
WAITS = "test_a_cancel_of_one_that_has_not_begun_frees_all"
ELSEWHERE = "test_kv_of_another_instance_is_gone_on_with"
USED = "test_what_lies_in_a_block_is_what_is_computed_with"


@pytest.mark.parametrize(
    ("cls", "caught"),
    [
        (Leaky, {OUT}),
        (Fragile, {OUT, MANY}),
        (Successor, {IDS}),
        (Careless, {CLOSED}),
        (Deaf, {WAITS}),
        (Stranger, {ELSEWHERE}),
        (Distrustful, {ELSEWHERE}),
        (Hermit, {USED}),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(
    monkeypatch: pytest.MonkeyPatch, cls: type[ScriptedEngine], caught: set[str]
) -> None:
    for module in (engine_fault_suite, engine_harness):
        monkeypatch.setattr(module, "PATIENCE", 2.0)
    if cls is Hermit:
        monkeypatch.setattr(ToySequence, "_check", lambda self, found: None)
    assert ran(MODULE.format(cls.__name__), caught).failed == caught


def test_what_they_were_made_of_keeps_it() -> None:
    assert not ran(MODULE.format(ScriptedEngine.__name__)).failed
