"""Whose turn it is, without clocks and processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd_runtime.pipeline.admission_shares import REMEMBERED, DrainRate, FairQueue


@dataclass(eq=False)
class Asking:
    tenant: str
    cost: float = 1.0
    priority: int = 0


def queue(*asking: Asking, weights: dict[str, float] | None = None) -> FairQueue[Asking]:
    made: FairQueue[Asking] = FairQueue(weights or {})
    for each in asking:
        made.put(each)
    return made


def drained(waiting: FairQueue[Asking], count: int | None = None) -> list[Asking]:
    order = []
    for _ in range(len(waiting) if count is None else count):
        order.append(waiting.first())
        waiting.take(order[-1])
    return order


def test_of_one_tenant_the_first_comes_first() -> None:
    asking = [Asking("a", cost) for cost in (5, 1, 3)]
    assert drained(queue(*asking)) == asking


def test_the_more_urgent_come_first_whoever_asks() -> None:
    asking = [Asking("a"), Asking("b", priority=2), Asking("a", priority=1), Asking("b", priority=-1)]
    assert drained(queue(*asking)) == [asking[3], asking[0], asking[2], asking[1]]


def test_a_tenant_who_floods_waits_behind_one_who_asks_little() -> None:
    flood = [Asking("flood") for _ in range(100)]
    one = Asking("modest")
    waiting = queue(*flood)
    drained(waiting, 50)
    waiting.put(one)
    assert one in drained(waiting, 2)


def test_what_was_used_while_nobody_else_wanted_it_costs_nothing_later() -> None:
    waiting = queue()
    for _ in range(1000):
        waiting.pass_by("early", 100)
    for tenant in ("late", "early") * 10:
        waiting.put(Asking(tenant, 100))
    first = Counter(asking.tenant for asking in drained(waiting, 10))
    assert abs(first["late"] - first["early"]) <= 2


def test_who_was_idle_has_saved_nothing_up() -> None:
    waiting = queue(*(Asking("busy") for _ in range(200)), Asking("idle"))
    drained(waiting, 101)
    for _ in range(100):
        waiting.put(Asking("idle"))
    first = Counter(asking.tenant for asking in drained(waiting, 40))
    assert abs(first["busy"] - first["idle"]) <= 2


def test_an_answer_longer_than_thought_is_paid_for_by_later_turns() -> None:
    waiting = queue(*(Asking(tenant) for tenant in "ab" for _ in range(50)))
    drained(waiting, 2)
    waiting.correct("a", 9)
    assert [asking.tenant for asking in drained(waiting, 10)] == ["b"] * 9 + ["a"]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(1, 1000), min_size=60, max_size=60),
    st.lists(st.floats(1, 1000), min_size=60, max_size=60),
    st.floats(0.25, 4),
)
def test_those_who_always_wait_get_their_shares_to_within_one_request(
    a: list[float], b: list[float], weight: float
) -> None:
    waiting = queue(*(Asking("a", cost) for cost in a), *(Asking("b", cost) for cost in b), weights={"a": weight})
    served = {"a": 0.0, "b": 0.0}
    while set(waiting.lengths()) == {"a", "b"}:
        asking = waiting.first()
        waiting.take(asking)
        served[asking.tenant] += asking.cost
        ahead = served["a"] / weight - served["b"]
        assert -max(b) - 1e-6 <= ahead <= max(a) / weight + 1e-6


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.floats(1, 9)), max_size=40), st.data())
def test_whoever_leaves_in_whatever_order_the_others_have_their_turn(
    some: list[tuple[str, int, float]], data: st.DataObject
) -> None:
    asking = [Asking(tenant, cost, priority) for tenant, priority, cost in some]
    waiting = queue(*asking)
    gone = data.draw(st.lists(st.sampled_from(asking), unique=True)) if asking else []
    for each in gone:
        waiting.remove(each)
        waiting.remove(each)
    assert len(waiting) == len(asking) - len(gone) == sum(waiting.lengths().values())
    left = drained(waiting)
    assert set(left) == set(asking) - set(gone)
    assert [each.priority for each in left] == sorted(each.priority for each in left)


def test_who_gives_way_is_the_newest_of_the_longest_line_of_the_least_urgent() -> None:
    modest, urgent = Asking("modest"), [Asking("flood", priority=-1) for _ in range(9)]
    flood = [Asking("flood") for _ in range(3)]
    waiting = queue(modest, *urgent, *flood)
    assert waiting.last() is flood[-1]
    assert queue(Asking("a"), Asking("a"), Asking("b"), weights={"a": 4}).last().tenant == "b"


def test_how_many_come_first() -> None:
    waiting = queue(*(Asking("flood") for _ in range(100)), Asking("modest"), Asking("other", priority=-1))
    assert waiting.ahead("flood", 0) == 100 + 1 + 1
    assert waiting.ahead("modest", 0) == 1 + 2 + 1
    assert waiting.ahead("new", 0) == 1 + 1 + 1
    assert waiting.ahead("new", -1) == 1
    assert waiting.ahead("new", -2) == 0


def test_of_very_many_tenants_only_those_who_had_most_are_remembered() -> None:
    waiting = queue(Asking("waits"))
    for number in range(3 * REMEMBERED):
        waiting.pass_by(f"tenant-{number}", 1)
    assert len(waiting._served) <= REMEMBERED + 1
    assert waiting.first().tenant == "waits"


def test_the_rate_at_which_a_queue_drains_is_that_of_the_time_in_which_any_waited() -> None:
    rate = DrainRate()
    assert rate.per_second(0.0) is None
    rate.step(1000.0, 0, waiting=True)
    assert rate.per_second(1000.1) is None
    for tenth in range(1, 101):
        rate.step(1000 + tenth / 10, 2, waiting=True)
    assert rate.per_second(1010.0) == pytest.approx(20, rel=0.05)
    rate.step(1010.0, 0, waiting=False)
    assert rate.per_second(1020.0) == pytest.approx(20, rel=0.05)
    # What was an hour ago says nothing.
    assert rate.per_second(4610.0) is None
    rate.step(4610.0, 0, waiting=True)
    assert rate.stuck(4613.0) == 3.0
    assert (rate.per_second(4660.0) or 0.0) < 1
