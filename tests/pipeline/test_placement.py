"""Which workers are cheapest, over all pairs of pools, and that what gets better is not chosen less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdd_runtime.errors import NoRoute
from pdd_runtime.pipeline.cost import compute, wait, way
from pdd_runtime.pipeline.placement import Placement, place
from pdd_runtime.pipeline.routing_policies import HitThreshold
from pdd_runtime.plugins.routing import ClusterView, EdgeView, LinkView, RequestFacts, Role, WorkerKey, WorkerView

FACTS = RequestFacts(prompt_tokens=1000, max_tokens=100)
PROPERTY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def worker(role: Role, side: int = 1, index: int = 0, **more: Any) -> WorkerView:
    """Of one of the two sides of its role: `prefill1` and `relay1` in a1, `main2` in b2, …"""
    told: dict[str, Any] = {"cached_tokens": 0, "running": 0, "waiting": 0, "batch_limit": 16}
    told |= {"token_bytes": 50_000, "token_time": 0.001, "request_time": 0.5}
    cluster = f"{'b' if role == 'main' else 'a'}{side}"
    return WorkerView(key=WorkerKey(f"{role}{side}", index, "e"), role=role, cluster=cluster, **(told | more))


def edges() -> tuple[EdgeView, ...]:
    """Two sides that prefill, two that decode, each joined with each."""
    found = []
    for a in (1, 2):
        found.append(EdgeView(source=f"prefill{a}", target=f"relay{a}", carries="kv", link=None))
        for b in (1, 2):
            link = f"a{a}-b{b}"
            found.append(EdgeView(source=f"prefill{a}", target=f"main{b}", carries="kv", link=link))
            found.append(EdgeView(source=f"relay{a}", target=f"main{b}", carries="tokens", link=link))
    return tuple(found)


def link(a: int, b: int, **more: Any) -> LinkView:
    """50 MB/s there, 20 ms: 1,000 tokens are 1.02 s on their way."""
    told: dict[str, Any] = {"bandwidth": 50e6, "rtt": 0.02}
    return LinkView(name=f"a{a}-b{b}", source=f"a{a}", target=f"b{b}", **(told | more))


ROLES: tuple[Role, ...] = ("prefill", "relay", "main")
WORKERS = tuple(worker(role, side) for role in ROLES for side in (1, 2))
LINKS = tuple(link(a, b) for a in (1, 2) for b in (1, 2))


def view(*changed: WorkerView, links: Iterable[LinkView] = (), without: Iterable[str] = ()) -> ClusterView:
    """All of two by two, idle and cold, but for what is `changed`, the `links` given, and the pools left out."""
    workers = {each.key: each for each in (*WORKERS, *changed)}
    ways = {each.name: each for each in (*LINKS, *links)}
    there = tuple(each for key, each in workers.items() if key.pool not in without)
    return ClusterView(workers=there, edges=edges(), links=tuple(ways.values()))


def pools(placement: Placement) -> tuple[str, str]:
    assert placement.prefill is not None
    return placement.prefill.key.pool, placement.main.key.pool


def chosen(view: ClusterView, seeds: int = 200) -> Counter[tuple[str, str]]:
    return Counter(pools(place(msgspec.structs.replace(FACTS, seed=seed), view)) for seed in range(seeds))


# The cost


def test_who_decodes_side_by_side_delays_half_as_much_as_who_must_end_first() -> None:
    assert wait(FACTS, worker("main")) == 0.0
    assert wait(FACTS, worker("main", running=16)) == 16 * 0.5 / 2
    assert wait(FACTS, worker("main", running=16, waiting=4)) == 16 * 0.5 / 2 + 4 * 0.5
    # Prompts are computed one after another.
    assert wait(FACTS, worker("prefill", running=1, waiting=3)) == 4 * 0.5


def test_where_nobody_has_measured_those_ahead_are_like_this_one() -> None:
    assert wait(FACTS, worker("prefill", running=3, request_time=None)) == pytest.approx(3 * 1000 * 0.001)
    assert compute(FACTS, worker("prefill", cached_tokens=400, token_time=None)) == pytest.approx(600 * 1e-4)


def test_a_way_takes_what_waits_on_it_what_is_lacking_and_how_long_it_is_silent() -> None:
    queued = link(1, 1, queue=25_000_000, goodput=25e6, stalled=3.0)
    assert way(worker("prefill"), queued).takes(500) == pytest.approx(0.02 + 3.0 + 1.0 + 1.0)
    assert way(worker("prefill"), queued).takes(0) == 0.0
    assert 0.0 < way(worker("prefill"), None).takes(1000) < 0.1


# What decides


def test_among_equals_every_pair_gets_its_share() -> None:
    counts = chosen(view())
    assert len(counts) == 4
    assert min(counts.values()) > 25


def test_the_same_request_gets_the_same_workers_in_every_frontend() -> None:
    workers = view().workers
    for seed in range(20):
        facts = msgspec.structs.replace(FACTS, seed=seed)
        orders = (workers, workers[::-1], workers[3:] + workers[:3])
        assert len({pools(place(facts, msgspec.structs.replace(view(), workers=order))) for order in orders}) == 1


@pytest.mark.parametrize(
    ("what", "pair"),
    [
        ({"changed": [worker("prefill", 2, cached_tokens=500)]}, ("prefill2", None)),
        ({"changed": [worker("main", 2, cached_tokens=500)]}, (None, "main2")),
        ({"changed": [worker("prefill", 1, running=1)]}, ("prefill2", None)),
        ({"changed": [worker("main", 1, running=3)]}, (None, "main2")),
        ({"changed": [worker("relay", 1, running=16, waiting=8)]}, ("prefill2", None)),
        ({"without": ["relay1"]}, ("prefill2", None)),
        ({"without": ["prefill1"]}, ("prefill2", None)),
        ({"without": ["main1"]}, (None, "main2")),
        ({"links": [link(2, 1, goodput=100e6)]}, ("prefill2", "main1")),
        ({"links": [link(a, b, queue=50_000_000) for a, b in ((1, 1), (1, 2), (2, 2))]}, ("prefill2", "main1")),
        ({"links": [link(a, b, rtt=0.3) for a, b in ((1, 1), (1, 2), (2, 1))]}, ("prefill2", "main2")),
        ({"links": [link(1, 1, stalled=2.0), link(1, 2, stalled=2.0)]}, ("prefill2", None)),
        ({"changed": [worker("prefill", 2, token_time=0.0005)]}, ("prefill2", None)),
    ],
    ids=[
        *("prefill's cache", "main's cache", "prefill's load", "main's load", "a relay's load", "no relay"),
        *("a side that is away", "a main that is away", "goodput", "what waits for links", "round trips"),
        *("links that are silent", "a faster prefill"),
    ],
)
def test_each_thing_decides_where_all_else_is_equal(what: dict[str, Any], pair: tuple[str | None, str | None]) -> None:
    seen = chosen(view(*what.pop("changed", ()), **what), 50)
    for prefill, main in seen:
        assert pair[0] in (None, prefill)
        assert pair[1] in (None, main)
    # What it says nothing about is still spread.
    assert len(seen) == (1 if None not in pair else 2)


def test_a_way_that_is_hidden_by_a_relay_costs_less_than_one_that_is_not() -> None:
    # Without a relay its KV is waited for: as long as on a link of half the bandwidth.
    assert chosen(view(without=["relay1"], links=[link(2, 1, bandwidth=40e6)]), 50).keys() <= {
        ("prefill2", "main1"),
        ("prefill2", "main2"),
    }
    slower = [link(2, b, bandwidth=20e6) for b in (1, 2)]
    assert {prefill for prefill, _ in chosen(view(without=["relay1"], links=slower), 50)} == {"prefill1"}


# Conversations


def test_a_conversation_stays_where_its_prefix_is_until_that_costs_more_than_it_saves() -> None:
    facts = msgspec.structs.replace(FACTS, prompt_tokens=1000)
    # 800 tokens cached on both sides: 0.8 s of computing, and 0.8 s of the link.
    here = {"cached_tokens": 800}
    for side in (1, 2):
        home = view(worker("prefill", side, **here), worker("main", side, **here))
        assert {pools(place(msgspec.structs.replace(facts, seed=seed), home)) for seed in range(50)} == {
            (f"prefill{side}", f"main{side}")
        }
    # One request ahead of it on prefill delays it by 0.5 s, two by 1.0 s.
    assert pools(place(facts, view(worker("prefill", 1, running=1, **here))))[0] == "prefill1"
    assert pools(place(facts, view(worker("prefill", 1, running=2, **here))))[0] == "prefill2"
    # Each that decodes on main delays it by 0.25 s.
    assert pools(place(facts, view(worker("main", 1, running=3, **here))))[1] == "main1"
    assert pools(place(facts, view(worker("main", 1, running=4, **here))))[1] == "main2"


def test_of_the_workers_of_one_pool_the_one_with_the_prefix_is_taken() -> None:
    other = worker("main", 1, index=1, cached_tokens=900)
    found = {place(msgspec.structs.replace(FACTS, seed=seed), view(other)).main.key for seed in range(20)}
    assert found == {other.key}


# What gets better is not chosen less


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Two by two with several workers a pool, at any moment; some pools are away."""
    counts = st.integers(0, 24)
    workers = [
        worker(
            role,
            side,
            index,
            cached_tokens=draw(st.sampled_from([0, 0, 0, 16, 500, 984, 1000])),
            running=draw(counts),
            waiting=draw(st.sampled_from([0, 0, 1, 8])),
            token_time=draw(st.sampled_from([None, 0.0001, 0.001])),
            request_time=draw(st.sampled_from([None, 0.01, 0.5])),
        )
        for role in ROLES
        for side in (1, 2)
        for index in range(draw(st.integers(0, 3)))
    ]
    links = [
        link(
            a,
            b,
            rtt=draw(st.sampled_from([0.001, 0.05])),
            goodput=draw(st.sampled_from([None, 1e6, 50e6, 1e9])),
            queue=draw(st.sampled_from([0, 0, 10**6, 10**8])),
            stalled=draw(st.sampled_from([0.0, 0.0, 2.5])),
        )
        for a in (1, 2)
        for b in (1, 2)
    ]
    return ClusterView(workers=tuple(workers), edges=edges(), links=tuple(links))


def placed(facts: RequestFacts, view: ClusterView) -> Placement | None:
    try:
        return place(facts, view)
    except NoRoute:
        return None


def taking(view: ClusterView, better: WorkerView) -> ClusterView:
    return msgspec.structs.replace(
        view, workers=tuple(better if each.key == better.key else each for each in view.workers)
    )


def of(placement: Placement, role: str) -> WorkerView:
    found: WorkerView = getattr(placement, role)
    return found


@PROPERTY
@given(views(), st.integers(0, 2**32 - 1), st.sampled_from(ROLES), st.integers(1, 1000))
def test_who_has_more_cached_is_still_chosen(view: ClusterView, seed: int, role: Role, more: int) -> None:
    facts = msgspec.structs.replace(FACTS, seed=seed)
    before = placed(facts, view)
    if before is None or of(before, role) is None:
        return
    was = of(before, role)
    better = msgspec.structs.replace(was, cached_tokens=was.cached_tokens + more)
    assert of(place(facts, taking(view, better)), role).key == was.key


@PROPERTY
@given(views(), st.integers(0, 2**32 - 1), st.sampled_from(("prefill", "main")), st.integers(1, 24))
def test_who_has_less_to_do_is_still_chosen(view: ClusterView, seed: int, role: Role, less: int) -> None:
    facts = msgspec.structs.replace(FACTS, seed=seed)
    before = placed(facts, view)
    if before is None:
        return
    was = of(before, role)
    better = msgspec.structs.replace(was, running=max(0, was.running - less))
    assert of(place(facts, taking(view, better)), role).key == was.key


@PROPERTY
@given(views(), st.integers(0, 2**32 - 1), st.sampled_from(("queue", "stalled", "goodput", "rtt")))
def test_a_link_that_gets_better_is_still_taken(view: ClusterView, seed: int, what: str) -> None:
    facts = msgspec.structs.replace(FACTS, seed=seed)
    before = placed(facts, view)
    if before is None or before.way is None:
        return
    way = before.way
    better: dict[str, Any] = {"queue": way.queue // 2, "stalled": 0.0, "goodput": 2 * way.rate, "rtt": way.rtt / 2}
    links = tuple(msgspec.structs.replace(each, **{what: better[what]}) if each is way else each for each in view.links)
    assert place(facts, msgspec.structs.replace(view, links=links)).link == before.link


@PROPERTY
@given(views(), st.integers(0, 2**32 - 1))
def test_nobody_is_taken_where_another_is_better_in_everything(view: ClusterView, seed: int) -> None:
    before = placed(msgspec.structs.replace(FACTS, seed=seed), view)
    if before is None:
        return
    for role in ("prefill", "main"):
        taken = of(before, role)
        for other in view.workers:
            if other.key.pool == taken.key.pool and other.token_time and taken.token_time:
                assert not (
                    other.cached_tokens >= taken.cached_tokens + 200
                    and other.running + other.waiting + 4 <= taken.running + taken.waiting
                    and (other.request_time or 1) <= (taken.request_time or 0)
                    and other.token_time <= taken.token_time
                ), f"{taken} although {other}"


# Several frontends


def test_frontends_that_see_the_same_do_not_all_choose_the_same() -> None:
    """Each has counted its own requests, and has heard nothing of the others' yet."""
    workers = {each.key: each for each in (worker("main", 1, index) for index in range(8))}
    asked: Counter[WorkerKey] = Counter()
    for frontend in range(4):
        own: Counter[WorkerKey] = Counter()
        for request in range(4):
            seen = [msgspec.structs.replace(each, waiting=own[key]) for key, each in workers.items()]
            facts = msgspec.structs.replace(FACTS, seed=1000 * frontend + request)
            own[place(facts, view(*seen, without=["main2"])).main.key] += 1
        assert max(own.values()) == 1, "its own requests count at once"
        asked += own
    # 16 requests on 8 workers: in the same order every time it would be four on each of four.
    assert len(asked) >= 7
    assert max(asked.values()) <= 4


def test_the_reason_has_the_numbers_that_decided_where_there_was_a_choice() -> None:
    policy = HitThreshold(HitThreshold.Config())
    home = view(worker("prefill", 2, cached_tokens=800, running=1), worker("main", 2, cached_tokens=600))
    reason = policy.plan(FACTS, home).reason
    assert "prefill2/0 and main2/0 cost least: 0.5 s in queue and 0.2 s for 200 tokens" in reason
    assert "0.42 s over a2-b2 for 400, 0 s in queue" in reason
    alone = view(without=["prefill2", "relay2", "main2"])
    assert "cost least" not in policy.plan(FACTS, alone).reason
