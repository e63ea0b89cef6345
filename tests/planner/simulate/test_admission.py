"""What is in flight is bounded by what there is room for; the others wait, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Outcome, Scenario, simulate

Make = Callable[..., Scenario]
FLOOD = Workload(prompt=1000, output=50, rate=20.0)
"""Two prefill workers do two requests a second."""


def test_a_flood_is_refused_and_the_rest_is_served_within_the_wait(scenario: Make) -> None:
    limits = ("spec.admission.max_wait=5s", "spec.admission.pools={prefill: {requests: 4}}")
    made = simulate(scenario(*limits), FLOOD, requests=600)
    assert made.rejected > 450
    assert made.answered + made.rejected == 600
    # At most four are with a worker, 2 s apart each way, behind a wait of 5 s.
    assert made.ttft.quantile(1.0) is not None
    assert made.ttft.quantile(1.0) <= 5.0 + 4.0 + 0.5
    assert made.achieved_rate == pytest.approx(2.0, rel=0.15)


def test_without_admission_all_of_them_wait_with_the_workers(scenario: Make) -> None:
    made = simulate(scenario(admission=False), FLOOD, requests=300, warmup=0)
    assert (made.answered, made.rejected) == (300, 0)
    assert made.ttft.quantile(1.0) == pytest.approx(300 / 2 - 300 / 20, rel=0.1)


def test_no_more_wait_than_the_queue_has_room_for(scenario: Make) -> None:
    limits = ("spec.admission.queue=3", "spec.admission.pools={prefill: {requests: 1}}")
    made = simulate(scenario(*limits), FLOOD, requests=300)
    # One with each worker, a second long, and three before them.
    assert made.ttft.quantile(1.0) is not None
    assert made.ttft.quantile(1.0) <= 1.0 + 2 * 1.0 + 0.5


def test_a_full_relay_is_done_without(scenario: Make) -> None:
    seen: list[Outcome] = []
    full = (
        "spec.routing.plugin=always-relay",
        "spec.handoff.plugin=none",
        "spec.admission.pools={relay: {requests: 1}}",
    )
    simulate(scenario(*full), Workload(prompt=100, output=300, rate=4.0), requests=200, observe=seen.append)
    routes = {outcome.route for outcome in seen}
    assert routes == {"P-RLD-MD", "P-MD"}


def test_a_link_takes_no_more_than_it_carries_in_its_time(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    """100 MB each, over 10 MB/s: one on its way, and what waits for the link is at most 2 s of it."""
    slow = ("spec.links.wan.bandwidth=80Mbit/s", "spec.admission.link_time=12s", "spec.admission.max_wait=900min")
    models = {"prefill": pool_model(kv_token=100_000.0)}
    limited, free = (
        simulate(
            scenario(*slow, "spec.routing.plugin=never-relay", models=models, admission=admission),
            Workload(prompt=1000, output=5, rate=0.5),
            requests=30,
            warmup=0,
        )
        for admission in (True, False)
    )
    assert limited.answered == free.answered == 30
    assert max(use.queue for use in limited.links) <= 120e6
    assert max(use.queue for use in free.links) > 240e6


def test_prompts_that_main_has_room_for_alone_go_one_after_the_other(
    scenario: Make, pool_model: Callable[..., PoolModel]
) -> None:
    tight = {"main": pool_model(capacity=1600)}
    made = simulate(
        scenario("spec.pools.main.replicas=1", "spec.admission.max_wait=600s", models=tight),
        Workload(prompt=1000, output=200, concurrency=4),
        requests=20,
        warmup=0,
    )
    assert made.answered == 20
    # 2 s of decoding each, one at a time.
    assert made.duration > 20 * 2.0
