"""Where queueing theory knows the answer, simulations find it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from pydantic import BaseModel

from pdd_runtime.graph import Graph
from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Scenario, simulate
from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.link import LinkModel, SimLink
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.latency import LatencyModel
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


class Simple(LatencyModel):
    """A prompt takes `prompt` seconds, however long it is; a step `step`, and `shared` more for each sequence in it."""

    name = "simple"

    class Config(BaseModel):
        prompt: float = 0.0
        step: float = 0.0
        shared: float = 0.0

    config: Config

    def prefill(self, new: int, context: int) -> float:
        return self.config.prompt

    def decode(self, batch: int, context: float) -> float:
        return self.config.step + self.config.shared * batch

    @property
    def source(self) -> str:
        return "this test"


ENGINE = {"plugin": "scripted"}
GRAPH = {"apiVersion": "pdd/v1alpha1", "kind": "InferenceGraph", "metadata": {"name": "closed"}}
ALONE = {"model": {"source": "toy"}, "clusters": {"a": {}}, "pools": {"all": {"role": "aggregated", "cluster": "a"}}}


def scenario(pools: dict[str, Simple], places: int, edges: list[dict[str, object]]) -> Scenario:
    """One worker a pool, all in one cluster; prompts are computed whole and one by one."""
    declared = {name: {"role": name, "cluster": "a", "engine": ENGINE} for name in pools}
    spec = {**ALONE, "pools": declared, "edges": edges, "routing": {"plugin": "never-relay"}}
    models = {
        name: PoolModel(latency, places, chunk=1 << 20, capacity=1 << 30, block=16, kv_constant=0.0, kv_token=1.0)
        for name, latency in pools.items()
    }
    return Scenario(Graph.model_validate({**GRAPH, "spec": spec}), models, load_plugins())


def e2e(of: Scenario, workload: Workload, seed: int) -> float:
    """Mean seconds of a request."""
    mean = simulate(of, workload, requests=2500, seed=seed).e2e.mean
    assert mean is not None
    return mean


def test_equal_prompts_wait_for_prefill_as_in_m_d_1() -> None:
    kv = {"from": "prefill", "to": "main", "carries": "kv", "transport": {"plugin": "tcp"}}
    pools = {"prefill": Simple(Simple.Config(prompt=0.1)), "main": Simple(Simple.Config(step=0.01))}
    workload = Workload.model_validate({"prompt": 1000, "output": 1, "rate": 5.0})
    expected = 0.1 + wait_md1(5.0, 0.1)
    holds(expected, lambda seed: e2e(scenario(pools, 1, [kv]), workload, seed), range(10), 0.1)


def test_answers_wait_for_a_place_in_the_batch_as_in_m_m_c() -> None:
    step, tokens, places = 0.01, 400, 4
    pools = {"aggregated": Simple(Simple.Config(step=step))}
    rate = 0.6 * places / (step * tokens)
    workload = Workload.model_validate({"prompt": 10, "output": f"exponential({tokens})", "rate": rate})
    expected = step * tokens + wait_mmc(places, rate, step * tokens)
    holds(expected, lambda seed: e2e(scenario(pools, places, []), workload, seed), range(10), 0.1)


def test_answers_whose_steps_take_as_long_as_they_are_many_share_the_processor() -> None:
    shared, tokens = 0.002, 400
    pools = {"aggregated": Simple(Simple.Config(shared=shared))}
    rate = 0.5 / (shared * tokens)
    workload = Workload.model_validate({"prompt": 10, "output": f"exponential({tokens})", "rate": rate})
    expected = stay_shared(rate, shared * tokens)
    holds(expected, lambda seed: e2e(scenario(pools, 1000, []), workload, seed), range(10), 0.15)
