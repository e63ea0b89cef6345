from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.errors import NoRoute
from pdd_runtime.pipeline.routing_policies import AlwaysRelay, HitThreshold, NeverRelay, Predictive
from pdd_runtime.plugins.routing import (
    ClusterView,
    EdgeView,
    RequestFacts,
    Role,
    RoutingPolicy,
    WorkerKey,
    WorkerView,
)

FACTS = RequestFacts(prompt_tokens=1000, max_tokens=100)
WAN = (
    EdgeView(source="prefill", target="relay", carries="kv", link=None),
    EdgeView(source="prefill", target="main", carries="kv", link="wan"),
    EdgeView(source="relay", target="main", carries="tokens", link="wan"),
)
LOCAL = (EdgeView(source="prefill", target="main", carries="kv", link=None),)


def worker(
    pool: str, index: int = 0, role: Role | None = None, *, cached: int = 0, running: int = 0, waiting: int = 0
) -> WorkerView:
    roles: dict[str, Role] = {"prefill": "prefill", "relay": "relay", "main": "main", "all": "aggregated"}
    return WorkerView(
        key=WorkerKey(pool, index, "e"),
        role=role or roles[pool],
        cluster="dc",
        cached_tokens=cached,
        running=running,
        waiting=waiting,
        batch_limit=16,
    )


def make(cls: type[RoutingPolicy], **config: Any) -> RoutingPolicy:
    return cls(cls.Config(**config))


def view(*workers: WorkerView, edges: tuple[EdgeView, ...] = WAN) -> ClusterView:
    return ClusterView(workers=workers, edges=edges)


WHOLE = (worker("prefill"), worker("relay"), worker("main"))


@pytest.mark.parametrize(("cached", "kind"), [(0, "P-RLD-MD"), (899, "P-RLD-MD"), (900, "P-MD"), (1000, "P-MD")])
def test_hit_threshold_relays_what_main_has_not_cached(cached: int, kind: str) -> None:
    route = make(HitThreshold).plan(FACTS, view(worker("prefill"), worker("relay"), worker("main", cached=cached)))
    assert route.kind == kind
    assert f"{cached} of 1000" in route.reason
    assert "90%" in route.reason


def test_the_threshold_can_be_set() -> None:
    workers = (worker("prefill"), worker("relay"), worker("main", cached=500))
    assert make(HitThreshold, threshold=0.5).plan(FACTS, view(*workers)).kind == "P-MD"
    assert make(HitThreshold, threshold=0.51).plan(FACTS, view(*workers)).kind == "P-RLD-MD"


def test_a_relay_is_pointless_inside_one_cluster() -> None:
    edges = (
        EdgeView(source="prefill", target="relay", carries="kv", link=None),
        EdgeView(source="prefill", target="main", carries="kv", link=None),
        EdgeView(source="relay", target="main", carries="tokens", link=None),
    )
    route = make(HitThreshold).plan(FACTS, view(*WHOLE, edges=edges))
    assert route.kind == "P-MD"
    assert "one cluster" in route.reason
    assert make(AlwaysRelay).plan(FACTS, view(*WHOLE, edges=edges)).kind == "P-RLD-MD"


def test_always_and_never_do_as_they_say() -> None:
    hot = (worker("prefill", cached=1000), worker("relay"), worker("main", cached=1000))
    assert make(AlwaysRelay).plan(FACTS, view(*hot)).kind == "P-RLD-MD"
    assert make(NeverRelay).plan(FACTS, view(*WHOLE)).kind == "P-MD"
    assert make(NeverRelay).plan(FACTS, view(*WHOLE)).relay is None


@pytest.mark.parametrize("cls", [HitThreshold, Predictive, AlwaysRelay, NeverRelay])
def test_without_a_relay_main_serves_and_the_reason_says_so(cls: type[RoutingPolicy]) -> None:
    route = make(cls).plan(FACTS, view(worker("prefill"), worker("main")))
    assert route.kind == "P-MD"
    assert cls is NeverRelay or "no relay is there" in route.reason


@pytest.mark.parametrize("cls", [HitThreshold, Predictive, AlwaysRelay, NeverRelay])
def test_an_aggregated_pool_serves_alone(cls: type[RoutingPolicy]) -> None:
    route = make(cls).plan(FACTS, view(worker("all", 0, running=1), worker("all", 1), edges=()))
    assert (route.kind, route.main.index, route.prefill, route.relay) == ("A", 1, None, None)


@pytest.mark.parametrize("cls", [HitThreshold, Predictive, AlwaysRelay, NeverRelay])
def test_one_token_needs_no_relay(cls: type[RoutingPolicy]) -> None:
    assert make(cls).plan(RequestFacts(prompt_tokens=1000, max_tokens=1), view(*WHOLE)).kind == "P-MD"


@pytest.mark.parametrize(
    ("workers", "edges", "missing"),
    [
        ((), (), "no aggregated worker is ready"),
        ((), WAN, "no prefill and no main worker is ready"),
        ((worker("prefill"), worker("relay")), WAN, "no main worker is ready"),
        ((worker("relay"), worker("main")), WAN, "no prefill worker is ready"),
        ((worker("prefill", role="prefill"), worker("far", role="main")), LOCAL, "feeds a main worker"),
    ],
)
def test_no_route_names_what_is_missing(
    workers: tuple[WorkerView, ...], edges: tuple[EdgeView, ...], missing: str
) -> None:
    with pytest.raises(NoRoute, match=missing):
        make(HitThreshold).plan(FACTS, view(*workers, edges=edges))


def test_the_least_loaded_worker_is_taken() -> None:
    workers = [worker(pool, i, running=3 - i) for pool in ("prefill", "relay", "main") for i in range(3)]
    route = make(AlwaysRelay).plan(FACTS, view(*workers))
    assert route.prefill is not None
    assert route.relay is not None
    assert (route.prefill.index, route.relay.index, route.main.index) == (2, 2, 2)


def test_a_few_common_tokens_do_not_pile_everything_onto_one_worker() -> None:
    # As a system prompt does: cached on the worker that served first.
    base = (worker("prefill"), worker("main", 0, cached=20, running=1), worker("main", 1))
    assert make(NeverRelay).plan(FACTS, view(*base)).main.index == 1


def test_equal_load_spreads() -> None:
    load = dict.fromkeys(range(4), 0)
    for _ in range(20):
        mains = [worker("main", index, running=n) for index, n in load.items()]
        load[make(NeverRelay).plan(FACTS, view(worker("prefill"), *mains)).main.index] += 1
    assert set(load.values()) == {5}


def test_a_relay_joined_by_a_kv_edge_alone_counts() -> None:
    edges = (*WAN[:2], EdgeView(source="relay", target="main", carries="kv", link="wan"))
    assert make(AlwaysRelay).plan(FACTS, view(*WHOLE, edges=edges)).kind == "P-RLD-MD"


def test_planning_is_pure() -> None:
    workers = [worker(pool, i, cached=i * 10, running=i) for pool in ("prefill", "relay", "main") for i in range(3)]
    policy = make(HitThreshold)
    first = policy.plan(FACTS, view(*workers))
    assert first == policy.plan(FACTS, view(*workers)) == make(HitThreshold).plan(FACTS, view(*reversed(workers)))
