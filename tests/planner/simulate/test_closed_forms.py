"""Where queueing theory knows the answer, simulations find it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Scenario, simulate
from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.link import LinkModel, SimLink
from tests.planner.conftest import SECONDS_A_TOKEN, STEP, Nothing, Simple
from tests.planner.simulate.closed_forms import holds, stay_shared, stay_shortest, wait_md1, wait_mmc

LINE = 1e8
SIZE = 1e7
SERVICE = SIZE / LINE


def times(model: LinkModel, rate: float, draw: Callable[[random.Random], float], seed: int, count: int) -> float:
    """Mean seconds from when a transfer is asked for to its end, of `count` that come at random, after a tenth."""
    events, numbers = Events(), random.Random(seed)
    link = SimLink(events, model)
    took: list[float] = []

    def come(left: int) -> None:
        at, size = events.now, draw(numbers)
        link.open(size, lambda: took.append(events.now - at)).add(size)
        if left:
            events.push(at + numbers.expovariate(rate), come, left - 1)

    events.push(0.0, come, count - 1)
    events.run()
    kept = took[count // 10 :]
    return sum(kept) / len(kept)


def exponential(numbers: random.Random) -> float:
    return numbers.expovariate(1.0 / SIZE)


def two_sizes(numbers: random.Random) -> float:
    """With the same mean, and nine times the variance of the exponential."""
    return 0.5 * SIZE if numbers.random() < 18 / 19 else 10 * SIZE


@pytest.mark.parametrize("busy", [0.5, 0.7])
def test_equal_transfers_in_order_wait_as_in_m_d_1(busy: float) -> None:
    rate, model = busy / SERVICE, LinkModel(LINE, 0.0, discipline="fifo")
    expected = SERVICE + wait_md1(rate, SERVICE)
    holds(expected, lambda seed: times(model, rate, lambda _: SIZE, seed, 4000), range(10), 0.1)


@pytest.mark.parametrize("connections", [1, 4])
def test_transfers_that_wait_for_connections_wait_as_in_m_m_c(connections: int) -> None:
    model = LinkModel(LINE, 0.0, flow_rate=LINE / connections, connections=connections, discipline="fifo")
    service = SERVICE * connections
    rate = 0.7 * connections / service
    expected = service + wait_mmc(connections, rate, service)
    holds(expected, lambda seed: times(model, rate, exponential, seed, 4000), range(10), 0.15)


@pytest.mark.parametrize("draw", [exponential, two_sizes])
def test_transfers_that_share_fairly_stay_as_under_processor_sharing(draw: Callable[[random.Random], float]) -> None:
    rate, model = 0.6 / SERVICE, LinkModel(LINE, 0.0, discipline="fair")
    holds(stay_shared(rate, SERVICE), lambda seed: times(model, rate, draw, seed, 4000), range(10), 0.2)


def test_shortest_first_stays_as_schrage_and_miller_say() -> None:
    rate, model = 0.8 / SERVICE, LinkModel(LINE, 0.0, ageing=0.0, small=0.0)
    expected = stay_shortest(rate, SERVICE)
    assert expected < 0.6 * stay_shared(rate, SERVICE)
    holds(expected, lambda seed: times(model, rate, exponential, seed, 4000), range(10), 0.15)


Make = Callable[..., Scenario]
Model = Callable[..., PoolModel]
ALONE = ("spec.pools={all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}", "spec.edges=[]")


class Shared(Simple):
    """Two milliseconds a step for each sequence in it."""

    def decode(self, batch: int, context: float) -> float:
        return 0.002 * batch


def e2e(of: Scenario, workload: dict[str, object], seed: int) -> float:
    """Mean seconds of a request."""
    mean = simulate(of, Workload.model_validate(workload), requests=2500, seed=seed).e2e.mean
    assert mean is not None
    return mean


def test_equal_prompts_wait_for_prefill_as_in_m_d_1(scenario: Make, pool_model: Model) -> None:
    one = scenario(
        "spec.routing.plugin=never-relay",
        "spec.pools.prefill.replicas=1",
        models={"prefill": pool_model(batch_limit=1)},
    )
    service, rate = 100 * SECONDS_A_TOKEN, 5.0
    workload = {"prompt": 100, "output": 1, "rate": rate}
    holds(service + wait_md1(rate, service), lambda seed: e2e(one, workload, seed), range(10), 0.1)


def test_answers_wait_for_a_place_in_the_batch_as_in_m_m_c(scenario: Make, pool_model: Model) -> None:
    places, tokens = 4, 400
    full = scenario(*ALONE, models={"all": pool_model(batch_limit=places)})
    service = tokens * STEP
    rate = 0.6 * places / service
    workload = {"prompt": 1, "output": f"exponential({tokens})", "rate": rate}
    expected = service + wait_mmc(places, rate, service)
    holds(expected, lambda seed: e2e(full, workload, seed), range(10), 0.1)


def test_answers_whose_steps_take_as_long_as_they_are_many_share_the_processor(
    scenario: Make, pool_model: Model
) -> None:
    shared = scenario(*ALONE, models={"all": pool_model(latency=Shared(Nothing()), batch_limit=1000)})
    service = 400 * 0.002
    rate = 0.5 / service
    workload = {"prompt": 1, "output": "exponential(400)", "rate": rate}
    holds(stay_shared(rate, service), lambda seed: e2e(shared, workload, seed), range(10), 0.15)
