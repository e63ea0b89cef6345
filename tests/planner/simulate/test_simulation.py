"""Whole simulations: the same for the same seed, flat in memory, with intervals that are honest."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest

from pdd_runtime.planner import Distribution, Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import METRICS, Histogram, Outcome, Scenario, Simulated, repeat, simulate
from pdd_runtime.planner.simulate.decode import Sequence
from pdd_runtime.planner.simulate.fetch import Fetch
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.repeated import interval, student
from pdd_runtime.planner.simulate.visit import Visit

Make = Callable[..., Scenario]
MANY = Workload(prompt=500, output="lognormal(60, 1)", hit="uniform(0, 0.95)", rate=3.0)
TALKS = Workload(prompt=800, output=40, hit=0.2, turns="uniform(1, 6)", new=100, think="exponential(5)", rate=3.0)


def test_the_same_seed_gives_the_same_figures_and_another_one_others(scenario: Make) -> None:
    one, again, other = (simulate(scenario(), MANY, requests=300, seed=seed).to_json() for seed in (1, 1, 2))
    assert one == again
    assert one["ttft"] != other["ttft"]


def test_every_token_of_every_request_is_made_once(scenario: Make) -> None:
    seen: list[Outcome] = []
    made = simulate(scenario(), TALKS, requests=400, observe=seen.append)
    assert len(seen) == made.requests == made.answered == 400
    assert sum(made.tokens.values()) == sum(outcome.output for outcome in seen)
    assert sum(made.routes.values()) == 400
    assert made.tokens["relay"] == sum(outcome.relay_tokens for outcome in seen)


def test_the_figures_are_those_of_the_single_requests(scenario: Make) -> None:
    seen: list[Outcome] = []
    made = simulate(scenario(), MANY, requests=500, observe=seen.append)
    for metric in METRICS:
        values = sorted(value for outcome in seen if (value := getattr(outcome, metric)) is not None)
        found = getattr(made, metric)
        assert found.count == len(values)
        assert found.mean == pytest.approx(sum(values) / len(values))
        for q in (0.5, 0.9, 0.99):
            assert found.quantile(q) == pytest.approx(values[math.ceil(q * len(values)) - 1], rel=0.006)
    both = sum((outcome.ttft or 0.0) <= 0.3 and (outcome.tpot or 0.0) <= 0.012 for outcome in seen)
    near = [
        sum((outcome.ttft or 0.0) <= 0.3 * by and (outcome.tpot or 0.0) <= 0.012 * by for outcome in seen)
        for by in (0.95, 1.05)
    ]
    assert near[0] <= made.within(0.3, 0.012) * 500 <= near[1]
    assert near[0] <= both <= near[1]


def test_conversations_are_asked_as_evenly_at_the_end_as_before(scenario: Make) -> None:
    """Where the sessions that make so many requests are followed to their ends, only a few are left in the end."""
    even, whole = (
        simulate(
            scenario(), TALKS.model_copy(update={"think": Distribution.fixed(60)}), requests=300, whole_sessions=to_end
        )
        for to_end in (False, True)
    )
    assert even.answered == whole.answered == 300
    assert even.offered_rate > 1.2 * whole.offered_rate


def test_without_a_warm_up_it_is_what_a_bench_sends(scenario: Make) -> None:
    seen: list[Outcome] = []
    simulate(scenario(), TALKS, requests=50, seed=4, warmup=0, observe=seen.append)
    asked = {
        (session.number, number): (turn.prompt, turn.output)
        for session in TALKS.sessions(50, 4)
        for number, turn in enumerate(session.turns)
    }
    assert {(one.session, one.turn): (one.prompt, one.output) for one in seen} == asked


def test_a_conversation_finds_its_history_on_main_and_its_prompts_on_prefill(scenario: Make) -> None:
    seen: list[Outcome] = []
    one_each = scenario("spec.pools.prefill.replicas=1", "spec.pools.main.replicas=1")
    simulate(one_each, TALKS, requests=300, warmup=0, observe=seen.append)
    later = [outcome for outcome in seen if outcome.turn]
    # A turn adds 100 tokens to all that was said; prefill has not made the answer of 40.
    assert later
    assert all(outcome.main_cached == outcome.prompt - 100 for outcome in later)
    assert all(outcome.prefill_cached == outcome.prompt - 140 for outcome in later)


def test_a_conversation_goes_where_its_history_is(scenario: Make) -> None:
    seen: list[Outcome] = []
    simulate(scenario("spec.pools.main.replicas=8"), TALKS, requests=400, observe=seen.append)
    later = [outcome for outcome in seen if outcome.turn]
    assert sum(outcome.main_cached for outcome in later) > 0.95 * sum(outcome.prompt - 100 for outcome in later)


@pytest.mark.parametrize("routing", ["hit-threshold", "predictive"])
@pytest.mark.parametrize("workload", [MANY, TALKS], ids=["many", "talks"])
def test_policies_that_see_only_whom_they_would_choose_choose_as_well(
    scenario: Make, routing: str, workload: Workload
) -> None:
    """Ties are broken by lot over whole views and by number over short ones: the figures agree, not the requests."""
    pools = ("spec.pools.prefill.replicas=4", "spec.pools.main.replicas=6", f"spec.routing.plugin={routing}")
    asked = workload.model_copy(update={"rate": 5.0})
    whole, short = (
        repeat(scenario(*pools, whole_views=views), asked, requests=500, seeds=range(3)) for views in (True, False)
    )
    for figure in (_ttft, _relay_share, _main_hits, _link_bytes):
        one, other = whole.interval(figure), short.interval(figure)
        assert one is not None
        assert other is not None
        assert other.mean == pytest.approx(one.mean, rel=0.15, abs=0.01), figure.__name__


def _ttft(run: Simulated) -> float | None:
    return run.ttft.mean


def _relay_share(run: Simulated) -> float:
    return run.relay_share


def _main_hits(run: Simulated) -> float:
    return run.hit_rates["main"]


def _link_bytes(run: Simulated) -> float:
    return run.link_bytes["wan"] / 1e9


@pytest.mark.parametrize("workload", [MANY, TALKS], ids=["many", "talks"])
def test_what_has_ended_is_gone_at_once(scenario: Make, workload: Workload) -> None:
    """Without a search for cycles, which would have to look at everything again and again."""
    gc.collect()
    gc.disable()
    try:
        simulate(scenario(), workload, requests=300)
        left = [type(each).__name__ for each in gc.get_objects() if isinstance(each, (Flight, Fetch, Sequence, Visit))]
    finally:
        gc.enable()
    # The link remembers its last transfer: one flight, its visit, its fetches.
    assert len(left) <= 4
    assert len(set(left)) >= len(left) - 1


def test_caches_hold_no_more_than_they_have_room_for(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    small = dict.fromkeys(("prefill", "relay", "main"), pool_model(capacity=8_000))
    made = simulate(scenario(models=small), TALKS, requests=600)
    roomy = simulate(scenario(), TALKS, requests=600)
    assert made.answered == roomy.answered == 600
    assert made.hit_rates["prefill"] < roomy.hit_rates["prefill"]


def test_a_closed_loop_has_as_many_requests_under_way_as_it_says(scenario: Make) -> None:
    workload = Workload(prompt=1000, output=101, concurrency=3)
    made = simulate(scenario("spec.routing.plugin=never-relay"), workload, requests=300)
    assert made.e2e.mean is not None
    # Little's law.
    assert made.achieved_rate * made.e2e.mean == pytest.approx(3.0, rel=0.03)


def test_what_is_busy_and_what_crosses_is_what_the_requests_need(scenario: Make) -> None:
    workload = Workload(prompt=1000, output=101, rate=0.5)
    made = simulate(scenario("spec.routing.plugin=never-relay"), workload, requests=1000)
    # Half a second of prefill a second, over two workers; 10 MB each over 1 GB/s.
    assert made.utilisation["prefill"] == pytest.approx(0.25, rel=0.1)
    assert made.link_bytes["wan"] == pytest.approx(1000 * 10e6, rel=0.02)
    assert next(use.busy for use in made.links if use.source == "dc-a") == pytest.approx(0.005, rel=0.1)
    main = next(use for use in made.pools if use.pool == "main")
    assert made.e2e.mean is not None
    assert main.requests == pytest.approx(0.5 * made.e2e.mean / 2, rel=0.25)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    import random

    rng = random.Random(7)
    held = 0
    for _ in range(1000):
        found = interval([rng.gauss(5.0, 2.0) for _ in range(4)])
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 5.0 <= found.high
    assert 930 <= held <= 970
    assert interval([3.0]).low is None


def test_students_quantiles_are_those_of_the_tables() -> None:
    published = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 1000: 1.962}
    assert {freedom: student(freedom) for freedom in published} == pytest.approx(published, rel=2e-3)


def test_repeated_runs_have_intervals_that_narrow(scenario: Make) -> None:
    few, many = (repeat(scenario(), MANY, requests=200, seeds=range(count)) for count in (3, 12))
    widths = []
    for repeated in (few, many):
        found = repeated.metric("ttft", "mean")
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.mean < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0]
    told = many.to_json()
    assert told["ttft"]["p90"]["low"] <= told["ttft"]["p90"]["mean"]
    assert len(told["runs"]) == 12


def test_use_is_that_while_requests_come_however_long_the_last_ones_take(scenario: Make) -> None:
    workload = Workload(prompt=1000, output=8000, rate=2.0, arrivals="fixed")
    made = simulate(scenario("spec.routing.plugin=never-relay"), workload, requests=100)
    assert made.duration > 2 * 50.0
    assert made.utilisation["prefill"] == pytest.approx(1.0, rel=0.05)
    # Its batches are never empty from the first answer on.
    assert made.utilisation["main"] == pytest.approx(1.0, rel=0.05)
    assert next(use.busy for use in made.links if use.source == "dc-a") == pytest.approx(0.02, rel=0.05)


def test_histograms_are_right_to_half_a_percent() -> None:
    histogram = Histogram()
    histogram.add([0.0] * 10 + [0.001 * number for number in range(1, 991)])
    assert histogram.quantile(0.005) == 0.0
    assert histogram.quantile(0.5) == pytest.approx(0.49, rel=0.006)
    assert histogram.quantile(1.0) == pytest.approx(0.99)
    assert histogram.share_within(0.495) == pytest.approx(0.505, abs=0.006)
    assert Histogram().quantile(0.5) is None
