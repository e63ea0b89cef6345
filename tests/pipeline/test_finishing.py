"""What ends on the relay, and why it must be bounded: the collapse in figure 5 of the PDD report (arXiv 2609.13161)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdd_runtime.pipeline.finishing_guard import FinishingGuard
from pdd_runtime.pipeline.hit_rates import LEAST, HitRates
from pdd_runtime.pipeline.routing_policies import AlwaysRelay, HitThreshold
from pdd_runtime.plugins.routing import ClusterView, Finishing, RequestFacts, Route
from tests.pipeline.relay_simulation import EDGES, MAIN, PREFILL, RELAY, WAN, Simulation

ALL = {"max_tokens": 1_000_000, "cached": 1.0, "requests": 1.0, "slots": 1.0, "hit_rate_gap": 1.0}
"""Whatever finds less cached on main than the threshold ends on the relay."""
MINUTES = 60.0


def simulation(limits: dict[str, Any] | None, *, guarded: bool = True) -> Simulation:
    config = HitThreshold.Config.model_validate({"threshold": 0.9, "finish_on_relay": limits})
    made = Simulation(HitThreshold(config), guarded=guarded)
    made.run(15 * MINUTES)
    return made


def share(kinds: list[str], kind: str = "P-RLD") -> float:
    return kinds.count(kind) / len(kinds)


@pytest.fixture(scope="module")
def never() -> Simulation:
    return simulation(None)


def test_where_all_end_on_main_its_hit_rate_is_prefills_and_the_relay_has_little_to_do(never: Simulation) -> None:
    assert abs(never.rates.gaps()["main"]) < 0.05
    assert share(never.seen.kinds) == 0
    assert never.seen.relay_tokens < 0.1 * never.seen.tokens
    assert max(never.seen.waiting) == 0


def test_without_a_guard_what_ends_on_the_relay_takes_the_cache_from_main_and_the_relay_collapses() -> None:
    collapsed = simulation(ALL, guarded=False)
    prefill, main = collapsed.rates.rates()["main"]
    assert prefill > 0.7
    assert main < 0.05
    assert share(collapsed.seen.kinds[-1000:]) > 0.95
    # And more and more wait for it: there is no state in which it could stay.
    quarter = len(collapsed.seen.waiting) // 4
    growth = [max(collapsed.seen.waiting[end - quarter : end]) for end in (quarter, 2 * quarter, 3 * quarter)]
    assert 100 < growth[0] < growth[1] - 100 < growth[2] - 200


def test_the_hit_rate_gap_alone_stops_it(never: Simulation) -> None:
    stopped = simulation(ALL | {"hit_rate_gap": 0.05})
    assert 0 < share(stopped.seen.kinds) < 0.2
    assert stopped.rates.gaps()["main"] < 0.1
    assert max(stopped.seen.waiting[-1000:]) <= 8
    assert stopped.seen.relay_tokens < 0.2 * stopped.seen.tokens


def test_within_the_bounds_that_are_set_by_default_nothing_is_lost(never: Simulation) -> None:
    bounded = simulation({})
    assert 0.01 < share(bounded.seen.kinds) <= 0.06
    assert bounded.rates.gaps()["main"] < 0.1
    assert max(bounded.seen.waiting) == 0
    assert bounded.seen.relay_tokens < 0.12 * bounded.seen.tokens


# Which, one by one


def plan(
    limits: dict[str, Any] | None, facts: RequestFacts, cached: int = 0, finishing: Finishing | None = None
) -> Route:
    workers = Simulation(AlwaysRelay(AlwaysRelay.Config()))._view({PREFILL: cached, MAIN: 0}).workers
    view = ClusterView(workers=workers, edges=EDGES, links=(WAN,), finishing=finishing or Finishing())
    return AlwaysRelay(AlwaysRelay.Config.model_validate({"finish_on_relay": limits})).plan(facts, view)


SHORT = RequestFacts(prompt_tokens=1000, max_tokens=64)


def test_it_is_off_unless_the_graph_says_so() -> None:
    assert plan(None, msgspec.structs.replace(SHORT, single=True)).kind == "P-RLD-MD"


def test_a_short_answer_to_what_was_never_seen_ends_on_the_relay() -> None:
    route = plan({}, SHORT, cached=100)
    assert (route.kind, route.prefill, route.relay, route.main) == ("P-RLD", PREFILL, RELAY, MAIN)
    assert route.reason.startswith("at most 64 tokens end on the relay: 10% of its prompt was seen before, and ")


def test_who_says_that_nothing_will_build_on_it_may_have_a_prompt_that_was_seen_before() -> None:
    route = plan({}, msgspec.structs.replace(SHORT, single=True), cached=900)
    assert route.kind == "P-RLD"
    assert "nothing will build on it" in route.reason


@pytest.mark.parametrize(
    ("facts", "cached", "finishing"),
    [
        ({"max_tokens": 65, "single": True}, 0, {}),
        ({}, 101, {}),
        ({"single": True}, 0, {"share": 0.05}),
        ({"single": True}, 0, {"sessions": {"relay/0": 2}}),
        ({"single": True}, 0, {"hit_rate_gaps": {"main": 0.06}}),
    ],
    ids=["a long answer", "a conversation", "too many of late", "too many on that relay", "main falls behind"],
)
def test_the_others_go_on_to_main(facts: dict[str, Any], cached: int, finishing: dict[str, Any]) -> None:
    route = plan({}, msgspec.structs.replace(SHORT, **facts), cached, Finishing(**finishing))
    assert route.kind == "P-RLD-MD"


def test_the_guard_counts_what_ends_on_each_relay_for_all_frontends() -> None:
    rates = HitRates(None)
    guard = FinishingGuard(rates, frontends=2)
    finishing = plan({}, SHORT)
    for _ in range(3):
        guard.begun(finishing)
    assert guard.view.sessions == {"relay/0": 6}
    assert 0.02 < guard.view.share < 0.03
    guard.ended(finishing)
    assert guard.view.sessions == {"relay/0": 4}
    for _ in range(LEAST):
        rates.saw("main", 100, 80, 40)
        guard.begun(plan(None, SHORT))
    assert guard.view.share < 0.025
    assert guard.view.hit_rate_gaps == pytest.approx({"main": 0.4})
