"""The built-in handoff strategies keep the contract, and the suite finds those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.pipeline.handoff_strategies import Adaptive, CatchUp, KvTransfer, OneShot, Stay
from pdd_runtime.plugins.handoff import HandoffStrategy, HandoffView, Step
from pdd_runtime.testing.handoff_suite import HandoffConformance
from tests.testing.outcomes import outcomes


class TestOneShot(HandoffConformance):
    plugin = OneShot


class TestCatchUp(HandoffConformance):
    plugin = CatchUp


class TestImpatientCatchUp(HandoffConformance):
    @pytest.fixture
    def strategy(self) -> HandoffStrategy:
        return CatchUp(CatchUp.Config.model_validate({"threshold": 1, "seal_at": 0, "patience": 1}))


class TestAdaptive(HandoffConformance):
    plugin = Adaptive


class TestBusyAdaptive(HandoffConformance):
    @pytest.fixture
    def strategy(self) -> HandoffStrategy:
        return Adaptive(Adaptive.Config.model_validate({"busy": 0.25, "busy_tokens": 10}))


class TestStay(HandoffConformance):
    plugin = Stay


class TestKvTransfer(HandoffConformance):
    plugin = KvTransfer


class Waiter(HandoffStrategy):
    """Never hands off."""

    name = "waiter"

    def step(self, view: HandoffView) -> Step:
        return Step("wait")


class Hasty(HandoffStrategy):
    """Seals whatever main has, and whatever the graph's bounds are."""

    name = "hasty"

    def step(self, view: HandoffView) -> Step:
        return Step("seal", view.known)


class Generous(OneShot):
    """Its relay makes more than the graph lets it."""

    name = "generous"

    def relay_bound(self, relay_load: float) -> int | None:
        return None


class Stateful(OneShot):
    name = "stateful"
    asked = 0

    def step(self, view: HandoffView) -> Step:
        self.asked += 1
        return Step("wait") if self.asked % 2 else super().step(view)


@pytest.mark.parametrize(
    ("cls", "caught"),
    [
        (
            Waiter,
            {
                "test_a_relay_at_its_bound_is_sealed_when_main_is_ready",
                "test_every_session_is_handed_off_or_ends",
                "test_with_equal_bounds_the_handoff_is_exactly_there",
            },
        ),
        (
            Hasty,
            {
                "test_nothing_is_sealed_or_extended_before_main_has_the_prompt",
                "test_nothing_is_sealed_before_the_first_token",
                "test_a_seal_takes_no_token_back_and_leaves_the_relay_its_minimum",
                "test_every_session_is_handed_off_or_ends",
                "test_with_equal_bounds_the_handoff_is_exactly_there",
            },
        ),
        (
            Generous,
            {
                "test_the_relays_bound_is_within_its_limits_under_every_load",
                "test_every_session_is_handed_off_or_ends",
                "test_with_equal_bounds_the_handoff_is_exactly_there",
            },
        ),
        (
            Stateful,
            {"test_the_same_view_gives_the_same_step", "test_a_relay_at_its_bound_is_sealed_when_main_is_ready"},
        ),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(cls: type[Any], caught: set[str]) -> None:
    assert outcomes(cls).failed == caught
