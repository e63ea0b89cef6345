"""Workers and links that fail: requests go on elsewhere, none is lost, and nothing is left over."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Failure, Outcome, Scenario, Simulated, SimulationError, simulate
from pdd_runtime.planner.simulate.world import World

Make = Callable[..., Scenario]
NEVER, ALWAYS = "spec.routing.plugin=never-relay", "spec.routing.plugin=always-relay"
ONE = Workload(prompt=1000, output=200, concurrency=1)
MANY = Workload(prompt=500, output="lognormal(100, 1)", hit="uniform(0, 0.9)", rate=3.0)


def alone(scenario: Scenario) -> tuple[Outcome, Simulated]:
    seen: list[Outcome] = []
    made = simulate(scenario, ONE, requests=1, warmup=0, observe=seen.append)
    return seen[0], made


def test_a_killed_main_loses_no_token(scenario: Make) -> None:
    whole, _ = alone(scenario(NEVER))
    outcome, made = alone(scenario(NEVER, failures=(Failure(at=2.0, duration=60.0, name="main"),)))
    assert made.tokens == {"prefill": 2, "relay": 0, "main": 198}
    assert outcome.ttft == whole.ttft
    # Another prefill or main has to compute or fetch what was known: the prompt and some ninety tokens.
    assert outcome.longest_gap is not None
    assert 0.05 < outcome.longest_gap < 2.0


def test_the_relay_goes_on_where_main_is_lost_and_another_main_takes_over(
    scenario: Make, pool_model: Callable[..., PoolModel]
) -> None:
    slow = {"prefill": pool_model(kv_token=500_000.0)}
    failures = (Failure(at=1.45, duration=60.0, name="main"),)
    outcome, made = alone(scenario(ALWAYS, models=slow, failures=failures, local_rate=1e11))
    # The half gigabyte sets out anew at 1.45: only then the relay is let go, and the user sees no gap.
    assert outcome.relay_tokens > 50
    assert outcome.handoff_gap == outcome.longest_gap
    assert outcome.handoff_gap is not None
    assert outcome.handoff_gap < 0.05
    assert sum(made.tokens.values()) == 200


def test_main_takes_over_where_the_relay_is_lost(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    slow = {"prefill": pool_model(kv_token=500_000.0)}
    failures = (Failure(at=1.3, duration=60.0, name="relay"),)
    outcome, made = alone(scenario(ALWAYS, models=slow, failures=failures, local_rate=1e11))
    assert 25 <= outcome.relay_tokens <= 30
    # Main is ready at 1.52, and computes what the relay had made: up to 60 ms from there.
    assert outcome.longest_gap == pytest.approx(1.52 - 1.3 + 0.06, abs=0.01)
    assert sum(made.tokens.values()) == 200


def test_another_relay_goes_on_where_there_is_one(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    slow = {"prefill": pool_model(kv_token=500_000.0)}
    two = "spec.pools.relay.replicas=2"
    both = [Failure(at=1.3, duration=60.0, name="relay", index=index) for index in (0, 1)]
    lost = [
        alone(scenario(ALWAYS, two, models=slow, failures=(failure,), local_rate=1e11))[0].relay_tokens
        for failure in both
    ]
    # One of them was not its relay. The other has made some thirty tokens; then prefill sends the KV again, and a relay
    # computes those tokens in as many milliseconds.
    assert max(lost) > min(lost) > 40


def test_another_prefill_begins_anew_where_one_is_lost(scenario: Make) -> None:
    failures = (Failure(at=0.5, duration=60.0, name="prefill", index=0),)
    others = (Failure(at=0.5, duration=60.0, name="prefill", index=1),)
    times = sorted(alone(scenario(NEVER, failures=each))[0].ttft or 0.0 for each in (failures, others))
    assert times == [pytest.approx(1.0), pytest.approx(1.5)]


def test_a_request_waits_for_the_only_worker_to_come_back(scenario: Make) -> None:
    one = "spec.pools.prefill.replicas=1"
    outcome, _ = alone(scenario(NEVER, one, failures=(Failure(at=0.5, duration=5.0, name="prefill"),)))
    assert outcome.ttft == pytest.approx(6.5, abs=0.11)


def test_who_gets_no_worker_in_time_is_told(scenario: Make) -> None:
    gone = scenario(
        NEVER, "spec.pools.prefill.replicas=1", "spec.recovery.wait=1s",
        failures=(Failure(at=0.5, duration=50.0, name="prefill"),),
    )  # fmt: skip
    made = simulate(gone, ONE, requests=1, warmup=0)
    assert (made.answered, made.failed) == (0, 1)


def test_kv_waits_for_a_link_that_is_cut_and_goes_on(scenario: Make) -> None:
    cut = (Failure(at=1.001, duration=3.0, kind="link", name="wan"),)
    whole, outcome = (alone(scenario(NEVER, failures=each))[0] for each in ((), cut))
    assert whole.e2e is not None
    assert outcome.e2e == pytest.approx(whole.e2e + 3.0)


@pytest.mark.parametrize("strategy", ["catch-up", "one-shot", "adaptive", "none"])
def test_whatever_fails_no_token_is_lost_and_nothing_is_left_over(scenario: Make, strategy: str) -> None:
    failures = tuple(
        Failure(at=20.0 + 1.3 * number, duration=4.0, name=name, index=number % 2 if name != "relay" else 0)
        for number in range(25)
        for name in ("prefill", "relay", "main")
    ) + tuple(Failure(at=30.0 + 9 * number, duration=3.0, kind="link", name="wan") for number in range(3))
    runs = []
    for broken in ((), failures, failures):
        answers: list[Outcome] = []
        failing = scenario(f"spec.handoff.plugin={strategy}", failures=broken)
        # What knows each other is there until it is searched for.
        gc.collect()
        gc.disable()
        try:
            made = simulate(failing, MANY, requests=300, observe=answers.append)
            (world,) = [each for each in gc.get_objects() if isinstance(each, World)]
        finally:
            gc.enable()
        runs.append(made)
        assert made.answered == 300
        assert sum(made.tokens.values()) >= sum(answer.output for answer in answers)
        for worker in world.workers.values():
            assert (worker.requests, worker.tokens, worker.running, worker.waiting) == (0, 0, 0, 0), str(worker.key)
        assert all(abs(promised) < 1.0 for promised in world.admission.promised.values())
        assert not world.flights
        del world, worker
    whole, one, again = runs
    assert one.to_json() == again.to_json()
    assert sum(whole.tokens.values()) == sum(one.tokens.values())
    assert (one.longest_gap.quantile(1.0) or 0.0) > (whole.longest_gap.quantile(1.0) or 0.0)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (Failure(at=1.0, duration=1.0, name="nobody"), "does not have"),
        (Failure(at=1.0, duration=1.0, name="main", index=7), "main/7"),
        (Failure(at=1.0, duration=1.0, kind="link", name="main"), "does not have"),
        (Failure(at=-1.0, duration=1.0, name="main"), "before the beginning"),
    ],
)
def test_what_the_graph_does_not_have_cannot_fail(scenario: Make, failure: Failure, says: str) -> None:
    with pytest.raises(SimulationError, match=says):
        simulate(scenario(failures=(failure,)), ONE, requests=1)
