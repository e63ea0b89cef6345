"""The built-in routing policies keep the contract, and the suite finds those that do not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import BaseModel

from pdd_runtime.errors import NoRoute
from pdd_runtime.pipeline.routing_policies import AlwaysRelay, HitThreshold, NeverRelay
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, RoutingPolicy
from pdd_runtime.testing.routing_suite import RoutingConformance
from tests.testing.outcomes import outcomes


class TestHitThreshold(RoutingConformance):
    plugin = HitThreshold


class TestAlwaysRelay(RoutingConformance):
    plugin = AlwaysRelay


class TestFinishingOnRelay(RoutingConformance):
    @pytest.fixture
    def policy(self) -> RoutingPolicy:
        limits = {"max_tokens": 4096, "cached": 0.5, "requests": 0.5, "slots": 1.0, "hit_rate_gap": 0.3}
        return AlwaysRelay(AlwaysRelay.Config.model_validate({"finish_on_relay": limits}))


class TestNeverRelay(RoutingConformance):
    plugin = NeverRelay


class Dice(NeverRelay):
    """Not pure."""

    name = "dice"

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        mains = [worker.key for worker in view.workers if worker.role == "main"]
        prefills = [worker.key for worker in view.workers if worker.role == "prefill"]
        if not mains or not prefills:
            raise NoRoute("something is missing")
        return Route(kind="P-MD", main=random.choice(mains), prefill=random.choice(prefills), reason="luck")


class Counter(NeverRelay):
    """Has a state."""

    name = "counter"

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self.count = 0

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        self.count += 1
        route = super().plan(facts, view)
        return Route(kind=route.kind, main=route.main, prefill=route.prefill, reason=f"request {self.count}")


class Reader(NeverRelay):
    """Reads a file for each request."""

    name = "reader"

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        with open(__file__):  # noqa: PTH123
            return super().plan(facts, view)


class Mute(NeverRelay):
    """Gives no reason."""

    name = "mute"

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        route = super().plan(facts, view)
        return Route(kind=route.kind, main=route.main, prefill=route.prefill, reason="")


@pytest.mark.parametrize(
    ("cls", "caught"),
    [
        (
            Dice,
            {
                "test_the_same_view_gives_the_same_route",
                "test_no_answer_depends_on_what_was_asked_before",
                "test_a_route_takes_ready_workers_along_edges",
                "test_where_a_whole_route_is_ready_there_is_an_answer_else_no_route",
                "test_no_route_names_what_is_missing",
            },
        ),
        (Counter, {"test_the_same_view_gives_the_same_route", "test_no_answer_depends_on_what_was_asked_before"}),
        (Reader, {"test_planning_does_no_io"}),
        (Mute, {"test_a_route_has_a_reason_in_one_line"}),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(cls: type[Any], caught: set[str]) -> None:
    assert outcomes(cls).failed == caught
