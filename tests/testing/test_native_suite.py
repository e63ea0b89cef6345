"""The suite for native KV finds engines that break the contract."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import CachedNames
from pdd_runtime.plugins.engine import (
    DecodeRequest,
    Engine,
    Extended,
    ModelSpec,
    Offer,
    OfferRequest,
    Received,
    ReceiveRequest,
)
from pdd_runtime.testing import engine_harness, native_suite
from pdd_runtime.testing.native_suite import NativeConformance
from pdd_runtime.testing.scripted import ScriptedEngine
from pdd_runtime.testing.scripted_native import ScriptedNative
from pdd_runtime.testing.scripted_request import ScriptedRequest
from pdd_runtime.testing.toy_sequence import ToySequence
from tests.testing.outcomes import ran

SETTINGS = {"data_plane": "native", "capacity_blocks": 256, "context_length": 512}


class Suite(NativeConformance):
    plugin: type[Engine]

    def make(self) -> Engine:
        return self.plugin(ScriptedEngine.Config.model_validate(SETTINGS), ModelSpec(source="script"))

    @pytest.fixture
    def giver(self) -> Engine:
        return self.make()

    @pytest.fixture
    def reader(self) -> Engine:
        return self.make()


class Leaky(ScriptedEngine):
    """Keeps a block of each offer that does not end by itself."""

    async def _offer(self, native: ScriptedNative, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        blocks = self._store.allocate(1)
        async for offer in super()._offer(native, request):
            yield offer
        self._store.release(blocks)


class Gullible(ScriptedEngine):
    """Takes what it cannot read for read, and goes on with something else."""

    async def _receive(self, native: ScriptedNative, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        try:
            async for received in super()._receive(native, request):
                yield received
        except EngineError:
            self._toy.start += 1
            self._store.reset_cache()
            yield Received(0, len(request.tokens))


class Hasty(ScriptedEngine):
    """Has drained while others still read."""

    async def drain(self) -> None:
        self._refusal = EngineError("draining")


class Mute(ScriptedEngine):
    """Tells nobody what it has cached."""

    async def start(self, host: Any) -> Any:
        class Deaf:
            def open_names(self, layout: Any) -> CachedNames:
                host.open_names(layout)
                return CachedNames(layout)

        return await super().start(Deaf())  # type: ignore[arg-type]


class Deaf(ScriptedEngine):
    """Ends no offer by its id."""

    def _named(self, request_id: str) -> list[ScriptedRequest]:
        return [] if self.role == "prefill" else super()._named(request_id)


class Proud(ScriptedEngine):
    """Says that it needs help, and does without."""

    @classmethod
    def promises(cls, model: ModelSpec, config: Any) -> Any:
        return super().promises(model, config.model_copy(update={"extend": "prefill_assisted"}))

    async def _extend(self, running: ScriptedRequest, sequence: ToySequence, request: DecodeRequest) -> Extended:
        if request.offer is None:
            return await super()._extend(running, sequence, request)
        assert self._native is not None
        received = await self._native.receive(running, sequence, request.offer, None)
        return Extended(len(request.tokens), 0, 0, received)


MODULE = """
from tests.testing.test_native_suite import Suite, {} as Plugin


class TestIt(Suite):
    plugin = Plugin


del Suite
"""
UNREAD = "test_an_offer_that_is_closed_unread_frees_all"
LATE = "test_a_late_reader_is_refused_or_right_but_never_wrong"
NO_OFFER = "test_what_is_no_offer_is_refused"
ASSISTED = "test_an_engine_that_is_assisted_needs_an_offer"
NAMES = "test_the_names_of_full_blocks_become_known_and_are_no_other_tenants"
CANCELLED = "test_a_cancelled_offer_ends"
MANY = "test_many_at_once_are_each_given_their_own"
DRAIN = "test_drain_waits_for_an_open_offer_and_makes_no_more"
TWICE = "test_an_offer_that_was_read_is_not_good_twice"


@pytest.mark.parametrize(
    ("cls", "caught"),
    [
        (Leaky, {UNREAD, CANCELLED, MANY}),
        (Gullible, {LATE, NO_OFFER, TWICE}),
        (Hasty, {DRAIN}),
        (Mute, {NAMES}),
        (Deaf, {CANCELLED}),
        (Proud, {ASSISTED}),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(
    monkeypatch: pytest.MonkeyPatch, cls: type[ScriptedEngine], caught: set[str]
) -> None:
    for module in (engine_harness, native_suite):
        monkeypatch.setattr(module, "PATIENCE", 5.0)
    assert ran(MODULE.format(cls.__name__), caught | {MANY}).failed == caught


def test_what_they_were_made_of_keeps_it() -> None:
    assert not ran(MODULE.format(ScriptedEngine.__name__)).failed
