"""Which requests end on the relay. Why they must be bounded: tests/planner/simulate/test_finishing.py."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdd_runtime.pipeline.finishing_guard import FinishingGuard
from pdd_runtime.pipeline.hit_rates import LEAST, HitRates
from pdd_runtime.pipeline.routing_policies import AlwaysRelay
from pdd_runtime.plugins.routing import (
    ClusterView,
    EdgeView,
    Finishing,
    LinkView,
    RequestFacts,
    Role,
    Route,
    WorkerKey,
    WorkerView,
)

PREFILL, RELAY, MAIN = (WorkerKey(name, 0, "epoch") for name in ("prefill", "relay", "main"))
EDGES = (
    EdgeView(source="prefill", target="relay", carries="kv", link=None),
    EdgeView(source="prefill", target="main", carries="kv", link="wan"),
    EdgeView(source="relay", target="main", carries="tokens", link="wan"),
)
WAN = LinkView(name="wan", source="dc-a", target="dc-b", bandwidth=1e9, rtt=0.05)


def worker(key: WorkerKey, role: Role, cluster: str, cached: int = 0) -> WorkerView:
    return WorkerView(
        key=key, role=role, cluster=cluster, cached_tokens=cached, running=0, waiting=0, batch_limit=8,
        token_bytes=100_000,
    )  # fmt: skip


def plan(
    limits: dict[str, Any] | None, facts: RequestFacts, cached: int = 0, finishing: Finishing | None = None
) -> Route:
    workers = (worker(PREFILL, "prefill", "dc-a", cached), worker(RELAY, "relay", "dc-a"), worker(MAIN, "main", "dc-b"))
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
