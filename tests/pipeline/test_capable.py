"""A route has only workers that can do what the request needs, whatever the policy."""

from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.errors import NoRoute, RequestError
from pdd_runtime.pipeline.capable import plan_capable
from pdd_runtime.pipeline.routing_policies import AlwaysRelay, HitThreshold, NeverRelay, NoConfig
from pdd_runtime.plugins.routing import (
    ClusterView,
    EdgeView,
    RequestFacts,
    Role,
    Route,
    RoutingPolicy,
    WorkerKey,
    WorkerView,
)

EDGES = (
    EdgeView(source="prefill", target="relay", carries="kv", link=None),
    EdgeView(source="prefill", target="main", carries="kv", link="wan"),
    EdgeView(source="relay", target="main", carries="tokens", link="wan"),
)
GUIDED = RequestFacts(prompt_tokens=1000, max_tokens=100, needs=("logprobs", "guided"))
ALL = {"logprobs", "guided"}


def worker(role: Role, can: set[str], index: int = 0, cached: int = 0, running: int = 0) -> WorkerView:
    return WorkerView(
        key=WorkerKey(role, index, "e"),
        role=role,
        cluster="dc",
        cached_tokens=cached,
        running=running,
        waiting=0,
        batch_limit=16,
        capabilities=frozenset(can),
    )


def view(*workers: WorkerView) -> ClusterView:
    return ClusterView(workers=workers, edges=EDGES)


def policies() -> list[Any]:
    return [cls(cls.Config()) for cls in (HitThreshold, AlwaysRelay, NeverRelay)]


@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_where_all_can_the_route_is_the_policys(policy: RoutingPolicy) -> None:
    cluster = view(worker("prefill", ALL), worker("relay", ALL), worker("main", ALL))
    assert plan_capable(policy, GUIDED, cluster) == policy.plan(GUIDED, cluster)


@pytest.mark.parametrize("policy", policies()[:2], ids=lambda policy: policy.name)
def test_a_relay_that_cannot_is_left_out_and_the_reason_says_so(policy: RoutingPolicy) -> None:
    cluster = view(worker("prefill", ALL), worker("relay", {"logprobs"}), worker("main", ALL))
    route = plan_capable(policy, GUIDED, cluster)
    assert (route.kind, route.relay) == ("P-MD", None)
    assert route.reason.startswith("relay cannot: guided, though ")
    plain = RequestFacts(prompt_tokens=1000, max_tokens=100, needs=("logprobs",))
    assert plan_capable(policy, plain, cluster).kind == "P-RLD-MD"


def test_a_relay_that_was_not_wanted_is_not_blamed() -> None:
    policy = HitThreshold(HitThreshold.Config())
    cluster = view(worker("prefill", ALL), worker("relay", set()), worker("main", ALL, cached=1000))
    assert "cannot" not in plan_capable(policy, GUIDED, cluster).reason


def test_the_one_that_can_is_taken_even_where_it_is_busy() -> None:
    policy = AlwaysRelay(AlwaysRelay.Config())
    relays = (worker("relay", set(), 0), worker("relay", ALL, 1, running=9))
    mains = (worker("main", ALL, 0, running=9), worker("main", set(), 1))
    route = plan_capable(policy, GUIDED, view(worker("prefill", ALL), *relays, *mains))
    assert route.relay is not None
    assert (route.kind, route.relay.index, route.main.index) == ("P-RLD-MD", 1, 0)


@pytest.mark.parametrize("role", ["prefill", "main"])
@pytest.mark.parametrize("policy", policies(), ids=lambda policy: policy.name)
def test_a_request_that_no_worker_can_serve_is_the_users_to_change(policy: RoutingPolicy, role: Role) -> None:
    roles: tuple[Role, ...] = ("prefill", "relay", "main")
    cluster = view(*(worker(each, {"logprobs"} if each == role else ALL) for each in roles))
    with pytest.raises(RequestError) as caught:
        plan_capable(policy, GUIDED, cluster)
    assert caught.value.what == f"pool {role} cannot: guided"
    assert caught.value.fix


def test_where_nobody_is_there_that_is_what_is_said() -> None:
    with pytest.raises(NoRoute):
        plan_capable(AlwaysRelay(AlwaysRelay.Config()), GUIDED, view(worker("prefill", set())))


def test_a_policy_that_knows_nothing_of_capabilities_is_kept_from_the_unable() -> None:
    class First(RoutingPolicy):
        name = "first"
        Config = NoConfig

        def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
            key = min(worker.key for worker in view.workers)
            return Route(kind="A", main=key, reason="the first there is")

    cluster = view(worker("aggregated", set(), 0), worker("aggregated", ALL, 1))
    assert plan_capable(First(NoConfig()), GUIDED, cluster).main.index == 1
