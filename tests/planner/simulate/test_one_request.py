"""One request alone: every second of it can be worked out by hand.

A prompt's token takes 1 ms, a step 10 ms, a message to main 10 ms. A prompt of 1,000 tokens is 10 MB of KV: 10 ms over
the link and 10 ms on the way, 8 ms to the relay.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Outcome, Scenario, Simulated, simulate
from tests.planner.conftest import STEP, Nothing, Simple

Make = Callable[..., Scenario]
NEVER, ALWAYS = "spec.routing.plugin=never-relay", "spec.routing.plugin=always-relay"
AGGREGATED = (
    "spec.pools={all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}",
    "spec.edges=[]",
)


def alone(scenario: Scenario, prompt: int = 1000, output: int = 11) -> tuple[Outcome, Simulated]:
    """What one request is like, and the run that it was all of."""
    seen: list[Outcome] = []
    workload = Workload(prompt=prompt, output=output, concurrency=1)
    made = simulate(scenario, workload, requests=1, warmup=0, observe=seen.append)
    (outcome,) = seen
    return outcome, made


def test_without_a_relay_the_second_token_waits_for_the_link(scenario: Make) -> None:
    outcome, made = alone(scenario(NEVER))
    assert outcome.route == "P-MD"
    assert outcome.ttft == pytest.approx(1.0)
    # KV is at main at 1.02; the driver hears of it and asks main, which makes a token, which comes back.
    assert outcome.tt2 == pytest.approx(1.02 + 0.01 + 0.01 + 0.01 + 0.01)
    assert outcome.longest_gap == pytest.approx(0.06)
    assert outcome.tt10 == pytest.approx(1.06 + 8 * 0.01)
    assert outcome.e2e == pytest.approx(1.06 + 9 * 0.01)
    assert outcome.tpot == pytest.approx(0.15 / 10)
    assert made.tokens == {"prefill": 1, "relay": 0, "main": 10}
    assert made.link_bytes == {"wan": pytest.approx(10e6)}


def test_a_prompt_of_several_chunks_is_on_its_way_while_it_is_computed(
    scenario: Make, pool_model: Callable[..., PoolModel]
) -> None:
    pieces = {"prefill": pool_model(chunk=256, kv_token=100_000.0)}
    outcome, _ = alone(scenario(NEVER, models=pieces))
    # 100 MB take 100 ms in all, and the last 232 tokens 23 ms of it.
    assert outcome.tt2 == pytest.approx(1.0 + 0.0232 + 0.01 + 0.04, abs=1e-3)
    whole, _ = alone(scenario(NEVER, models=pieces, overlap=False))
    assert whole.tt2 == pytest.approx(1.0 + 0.1 + 0.01 + 0.04)


def test_main_catches_up_with_the_relay_and_takes_over(scenario: Make) -> None:
    outcome, made = alone(scenario(ALWAYS), output=30)
    assert outcome.route == "P-RLD-MD"
    assert outcome.tt2 == pytest.approx(1.008 + 0.01)
    # Main is ready at 1.03, with tokens out at 1.0, 1.018 and 1.028: few enough to seal behind the one of 1.038. Main
    # hears of it at 1.048, and computes four tokens, 3 ms more than one, in its first step.
    assert outcome.relay_tokens == 3
    assert outcome.handoff_gap == pytest.approx(0.01 + 0.003 + 0.01 + 0.01)
    assert outcome.longest_gap == pytest.approx(outcome.handoff_gap)
    assert outcome.e2e == pytest.approx(1.038 + 0.033 + 25 * 0.01)
    assert made.tokens == {"prefill": 1, "relay": 3, "main": 26}
    assert made.relay_share == pytest.approx(3 / 29)


def test_rounds_get_shorter_until_main_takes_over(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    slow = {"prefill": pool_model(kv_token=1_000_000.0)}
    outcome, _ = alone(scenario(ALWAYS, models=slow), output=400)
    # A gigabyte: 1 s to main, 0.8 s to the relay. Some 22 tokens are out when main is ready at 2.02. It is asked to
    # extend over them: 10 ms there, 22 ms for the pass, 10 ms back. The relay has made 4 or 5 meanwhile.
    assert 24 <= outcome.relay_tokens <= 29
    assert outcome.handoff_gap is not None
    assert outcome.handoff_gap < 0.02 + 2 * 0.01 + 0.005


def test_one_shot_lets_the_relay_go_and_main_computes_all(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    slow = {"prefill": pool_model(kv_token=1_000_000.0)}
    outcome, _ = alone(scenario(ALWAYS, "spec.handoff.plugin=one-shot", models=slow), output=400)
    known = outcome.relay_tokens + 1
    assert 22 <= known <= 24
    assert outcome.handoff_gap == pytest.approx(0.01 + (known - 1) * 1e-3 + 0.01 + 0.01)


def test_a_relay_that_stays_makes_the_whole_answer_and_main_gets_its_kv(scenario: Make) -> None:
    outcome, made = alone(scenario(ALWAYS, "spec.handoff.plugin=none"), output=30)
    assert made.tokens == {"prefill": 1, "relay": 29, "main": 0}
    assert outcome.handoff_gap is None
    assert outcome.e2e == pytest.approx(1.008 + 29 * 0.01)


def test_a_relay_at_its_bound_waits_for_main(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    slow = {"prefill": pool_model(kv_token=1_000_000.0)}
    bounded = "spec.handoff={plugin: catch-up, config: {max_relay_tokens: 5}}"
    outcome, _ = alone(scenario(ALWAYS, bounded, models=slow), output=400)
    assert outcome.relay_tokens == 5
    # The fifth is out at 1.85; main is ready at 2.02, and goes on behind six known tokens.
    assert outcome.handoff_gap == pytest.approx(2.02 - 1.85 + 0.01 + 0.005 + 0.01 + 0.01)


def test_a_relay_is_not_sealed_before_its_least(scenario: Make) -> None:
    least = "spec.handoff={plugin: one-shot, config: {min_relay_tokens: 12}}"
    outcome, _ = alone(scenario(ALWAYS, least), output=30)
    assert outcome.relay_tokens == 12


def test_moved_kv_of_the_relay_spares_main_the_extend(scenario: Make) -> None:
    edge = (
        "spec.edges=[{from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}, "
        "{from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}, "
        "{from: relay, to: main, carries: kv, transport: {plugin: tcp}, link: wan}, "
        "{from: relay, to: main, carries: tokens, link: wan}]"
    )
    outcome, made = alone(scenario(ALWAYS, edge, "spec.handoff.plugin=kv-transfer"), output=30)
    known = outcome.relay_tokens + 1
    size = (known - 1) * 10_000
    assert made.link_bytes["wan"] == pytest.approx(10e6 + size)
    # Main is asked to fetch, and it asks the relay; the KV comes, the driver hears of it and asks main to decode.
    assert outcome.handoff_gap == pytest.approx(0.02 + size / 1e9 + 0.01 + 0.02 + 0.01 + 0.01)


def test_an_aggregated_worker_does_all(scenario: Make) -> None:
    outcome, made = alone(scenario(*AGGREGATED))
    assert (outcome.route, outcome.ttft) == ("A", pytest.approx(1.0 - 1e-3 + 0.01))
    assert outcome.e2e == pytest.approx(outcome.ttft + 10 * 0.01)
    assert made.tokens == {"prefill": 0, "relay": 0, "main": 11}


def test_a_long_prompt_on_an_aggregated_worker_takes_its_passes(
    scenario: Make, pool_model: Callable[..., PoolModel]
) -> None:
    pieces = {"all": pool_model(chunk=256)}
    outcome, _ = alone(scenario(*AGGREGATED, models=pieces))
    assert outcome.ttft == pytest.approx(0.768 + 0.231 + 0.01)


def test_one_token_comes_from_prefill_and_main_gets_its_kv(scenario: Make) -> None:
    outcome, made = alone(scenario(ALWAYS), output=1)
    assert (outcome.route, outcome.e2e, outcome.tpot) == ("P-MD", pytest.approx(1.0), None)
    assert made.link_bytes == {"wan": pytest.approx(10e6)}


def test_a_request_that_nothing_builds_on_ends_on_the_relay(scenario: Make) -> None:
    singular = "spec.routing={plugin: always-relay, config: {finish_on_relay: {max_tokens: 64}}}"
    outcome, made = alone(scenario(singular), output=30)
    assert outcome.route == "P-RLD"
    assert made.tokens == {"prefill": 1, "relay": 29, "main": 0}
    assert made.link_bytes == {"wan": 0.0}


def test_what_a_worker_adds_to_the_first_token_is_added_once(
    scenario: Make, pool_model: Callable[..., PoolModel]
) -> None:
    outcome, _ = alone(scenario(NEVER, models={"prefill": pool_model(overhead=0.5)}))
    assert outcome.ttft == pytest.approx(1.5)


class Growing(Simple):
    """A step takes 1 us more for each token of the context."""

    name = "growing"

    def decode(self, batch: int, context: float) -> float:
        return STEP + 1e-6 * context


def test_steps_get_longer_as_the_context_grows(scenario: Make, pool_model: Callable[..., PoolModel]) -> None:
    outcome, _ = alone(scenario(NEVER, models={"main": pool_model(latency=Growing(Nothing()))}), output=3001)
    steps = sum(STEP + 1e-6 * (1001 + number) for number in range(3000))
    assert outcome.e2e == pytest.approx(1.04 + steps + 0.01, rel=1e-3)
