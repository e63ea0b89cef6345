"""What ends on the relay, simulated with the policy that runs: the collapse in figure 5 of the PDD report
(arXiv 2609.13161), and the bounds that keep it away. docs/admission.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdd_runtime.pipeline.routing_policies import HitThreshold
from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Outcome, Scenario, simulate
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, RoutingPolicy
from tests.planner.conftest import Nothing, Simple

PLACES = 8
ALL = {"max_tokens": 1_000_000, "cached": 1.0, "requests": 1.0, "slots": 1.0}
"""Whatever finds less cached on main than the threshold may end on the relay."""
CONVERSATIONS = Workload.model_validate(
    {"prompt": 4000, "new": 150, "turns": 6, "think": 30, "output": "uniform(20, 200)", "rate": 12}
)


class Quick(Simple):
    """Prompts cost next to nothing, and a step as much as a large model's."""

    def prefill(self, new: int, context: int) -> float:
        return new * 1e-6

    def decode(self, batch: int, context: float) -> float:
        return 0.025


class Unbounded(HitThreshold):
    """Whatever needs a relay ends there."""

    name = "unbounded"

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        route = super().plan(facts, view)
        return msgspec.structs.replace(route, kind="P-RLD") if route.kind == "P-RLD-MD" else route


class Plugins(PluginManager):
    """The installed ones, and that policy."""

    def routing(self, name: str) -> type[RoutingPolicy]:
        return Unbounded if name == Unbounded.name else super().routing(name)


class Seen:
    """Five minutes of conversations."""

    def __init__(self, scenario: Scenario) -> None:
        self.outcomes: list[Outcome] = []
        self.run = simulate(scenario, CONVERSATIONS, requests=3600, seed=5, warmup=0, observe=self.outcomes.append)
        self.outcomes.sort(key=lambda outcome: outcome.due)

    def share(self, last: int | None = None) -> float:
        """Of requests that ended on the relay, all or of the last ones that were sent."""
        of = self.outcomes[-last:] if last else self.outcomes
        return sum(outcome.route == "P-RLD" for outcome in of) / len(of)

    @property
    def gap(self) -> float:
        return self.run.hit_rates["prefill"] - self.run.hit_rates["main"]

    def waits(self, first: int, last: int) -> float:
        """The longest wait between a first token and a second, of some requests in the order of their sending."""
        there = self.outcomes[first:last]
        return max(each.tt2 - each.ttft for each in there if each.tt2 is not None and each.ttft is not None)


@pytest.fixture
def seen(scenario: Callable[..., Scenario], pool_model: Callable[..., PoolModel]) -> Callable[..., Seen]:
    def make(limits: dict[str, Any] | None, policy: str = "hit-threshold") -> Seen:
        plugins = Plugins()
        plugins.load()
        model = {"latency": Quick(Nothing()), "kv_token": 100_000.0, "capacity": 1 << 40, "batch_limit": 1024}
        made = scenario(
            "spec.pools.prefill.replicas=1", "spec.pools.main.replicas=1",
            "spec.links.wan.rtt=50ms", "spec.links.wan.bandwidth=32Gbit/s",
            models={name: pool_model(**model) for name in ("prefill", "main")}
            | {"relay": pool_model(**model | {"batch_limit": PLACES})},
            admission=False,
        )  # fmt: skip
        routing = made.graph.spec.routing.model_copy(
            update={"plugin": policy, "config": {"threshold": 0.9, "finish_on_relay": limits}}
        )
        spec = made.graph.spec.model_copy(update={"routing": routing})
        return Seen(
            Scenario(
                graph=made.graph.model_copy(update={"spec": spec}), pools=made.pools, plugins=plugins, admission=False
            )
        )

    return make


def test_where_all_end_on_main_its_hit_rate_is_prefills_and_the_relay_has_little_to_do(
    seen: Callable[..., Seen],
) -> None:
    never = seen(None)
    assert abs(never.gap) < 0.05
    assert never.share() == 0
    assert never.run.relay_share < 0.1
    assert never.waits(0, len(never.outcomes)) < 2.0


def test_without_bounds_what_ends_on_the_relay_takes_the_cache_from_main_and_the_relay_collapses(
    seen: Callable[..., Seen],
) -> None:
    collapsed = seen(None, "unbounded")
    assert collapsed.run.hit_rates["prefill"] > 0.7
    assert collapsed.run.hit_rates["main"] < 0.05
    assert collapsed.share(1000) > 0.95
    # And more and more wait for it: there is no state in which it could stay.
    waits = [collapsed.waits(first, first + 300) for first in (0, 600, 1200)]
    assert 10 < waits[0] < waits[1] - 10 < waits[2] - 20


def test_the_hit_rate_gap_alone_stops_it(seen: Callable[..., Seen]) -> None:
    stopped = seen(ALL | {"hit_rate_gap": 0.05})
    assert 0 < stopped.share() < 0.2
    assert stopped.gap < 0.1
    assert stopped.run.relay_share < 0.2


def test_within_the_bounds_that_are_set_by_default_nothing_is_lost(seen: Callable[..., Seen]) -> None:
    bounded = seen({})
    assert 0.01 < bounded.share() <= 0.06
    assert bounded.gap < 0.1
    assert bounded.run.relay_share < 0.12
    assert bounded.waits(0, len(bounded.outcomes)) < 2.0
