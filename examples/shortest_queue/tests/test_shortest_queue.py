"""The suites hold the contracts; what is particular to these two is tested beside them."""

from __future__ import annotations

import pytest
from pdd_shortest_queue import LoadAware, LoadAwareConfig, ShortestQueue, ShortestQueueConfig

from pdd_runtime.plugins.handoff import HandoffStrategy, Step
from pdd_runtime.plugins.routing import ClusterView
from pdd_runtime.testing.handoff_suite import HandoffConformance, view
from pdd_runtime.testing.routing_suite import FACTS, PDD, RoutingConformance, worker


class TestShortestQueue(RoutingConformance):
    plugin = ShortestQueue


class TestLoadAware(HandoffConformance):
    plugin = LoadAware


class TestLoadAwareThatIsNeverBusy(HandoffConformance):
    @pytest.fixture
    def strategy(self) -> HandoffStrategy:
        return LoadAware(LoadAwareConfig(busy=100.0))


def test_the_shortest_queue_wins_over_a_cached_prompt() -> None:
    mains = (worker("main-a", 0, cached=1000, running=2), worker("main-a", 1, running=1))
    cluster = ClusterView(workers=(worker("prefill-a"), worker("relay-a"), *mains), edges=PDD)
    route = ShortestQueue(ShortestQueueConfig()).plan(FACTS, cluster)
    assert (route.kind, route.main.index) == ("P-RLD-MD", 1)
    assert "main-a/1 has 1" in route.reason


def test_a_relay_with_a_long_queue_is_left_out() -> None:
    workers = (worker("prefill-a"), worker("relay-a", waiting=9), worker("main-a"))
    route = ShortestQueue(ShortestQueueConfig()).plan(FACTS, ClusterView(workers=workers, edges=PDD))
    assert route.kind == "P-MD"


def test_a_busy_relay_is_freed_at_once_and_an_idle_one_is_caught_up_with() -> None:
    strategy = LoadAware(LoadAwareConfig(busy=0.5))
    assert strategy.step(view(100, relay_load=0.9)) == Step("seal", 100)
    assert strategy.step(view(100, relay_load=0.1)) == Step("extend", 100)
    assert strategy.step(view(110, relay_load=0.1, main_known=100, rounds=1)) == Step("seal", 110)
