from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from itertools import product

import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from pdd_runtime.errors import PddError
from pdd_runtime.graph import loads
from pdd_runtime.graph.document import parse
from pdd_runtime.planner.context_limit import ContextLimit
from pdd_runtime.planner.plan_spec import Effort, Plan, PlanError
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.search.bounds import Bounds
from pdd_runtime.planner.search.cheapest import cheapest
from pdd_runtime.planner.search.crew import Alone, crew
from pdd_runtime.planner.search.demand import Demand
from pdd_runtime.planner.search.family import Family, families, neighbours
from pdd_runtime.planner.search.goodput import EXACT, goodputs
from pdd_runtime.planner.search.improve import by_bcr, improved
from pdd_runtime.planner.search.point import Candidate, Point, front
from pdd_runtime.planner.search.trial import Trial, Verdict
from pdd_runtime.planner.search.trials import Trials
from pdd_runtime.planner.workload import Workload
from pdd_runtime.plugins.latency import LatencyModel

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: tiers}
spec:
  model: {source: any}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 100Gbit/s, rtt: 30ms}}
  pools:
    prefill: {role: prefill, cluster: dc-a, hardware: 8xh100, engine: {plugin: scripted, config: {tp: 8}}}
    relay: {role: relay, cluster: dc-a, hardware: 8xh100, engine: {plugin: scripted}}
    main: {role: main, cluster: dc-b, hardware: 8xh200, engine: {plugin: scripted}}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
  admission: {pools: {relay: {requests: 4}}}
"""
SPEC = {
    "graph": "tiers.yaml",
    "prices": {"nodes": {"h100": 1, "h200": 1.25}, "line": 0.35},
    "pools": {"prefill": {"replicas": "1..12"}, "relay": {"replicas": "0..3"}, "main": {"replicas": "1..12"}},
}


class NoConfig(BaseModel):
    pass


class Linear(LatencyModel):
    """A millisecond a token, and a hundredth of one more for each sequence of a step of 10 ms."""

    name = "linear"
    Config = NoConfig

    def prefill(self, new: int, context: int) -> float:
        return 1e-3 * new

    def decode(self, batch: int, context: float) -> float:
        return 0.010 + 1e-4 * batch

    @property
    def source(self) -> str:
        return "a test"


POOL = PoolModel(Linear(NoConfig()), 64, 512, 1_000_000, 16, 0.0, 1000.0)
DEMAND = Demand.of(Workload.model_validate({"prompt": 1000, "hit": 0.5, "output": 100}))


def plan(**changes: object) -> Plan:
    spec = {**SPEC, **changes}
    data = {"apiVersion": "pdd/v1alpha1", "kind": "Plan", "metadata": {"name": "sought"}, "spec": spec}
    return Plan.model_validate(data)


def made(**changes: object) -> tuple[Family, ...]:
    return families(plan(**changes), loads(GRAPH), parse("spec: {}", "plan.yaml"))


def bounds(made: Sequence[Family]) -> list[Bounds]:
    return [Bounds.of(family, DEMAND, dict.fromkeys(family.pools, POOL), 0.02) for family in made]


def trials(made: Sequence[Family], holds: Callable[[dict[str, int], float], bool]) -> Trials:
    """Where a deployment keeps its promise as `holds` says of its workers by pool, and a rate."""

    def work(trial: Trial) -> Verdict:
        sizes = dict(zip(made[trial.family].pools, trial.sizes, strict=True))
        kept = holds(sizes, trial.rate)
        busy = {pool: trial.rate / count for pool, count in sizes.items()}
        return Verdict(kept, {}, {}, () if kept else ("ttft",), busy, 0.0, {}, {})

    return Trials(made, bounds(made), Effort(), Alone(work), lambda what, done: None)


def tiers(sizes: dict[str, int], rate: float) -> bool:
    """A prefill worker reads 1.5 requests/s, or 1.7 where a relay hides the link; a main worker answers 20."""
    return rate <= sizes["prefill"] * (1.7 if sizes.get("relay") else 1.5) and rate <= sizes["main"] * 20


def cost(made: Sequence[Family]) -> Callable[[Candidate], float]:
    return lambda each: made[each.family].cost(each.sizes, plan().spec.prices).total.middle


def test_a_pool_of_none_goes_with_its_edges_and_limits() -> None:
    with_relay, without = made()
    assert with_relay.pools == ("prefill", "relay", "main")
    assert without.pools == ("prefill", "main")
    graph = without.graph((2, 3))
    assert [(edge.source, edge.target) for edge in graph.spec.edges] == [("prefill", "main")]
    assert not graph.spec.admission.pools
    assert graph.name == "sought"


def test_what_varies_makes_families_that_are_told_apart() -> None:
    kinds = made(
        pools={"prefill": {"replicas": 2, "hardware": ["8xh100", "16xh100"]}, "relay": {"replicas": "0..1"}},
        links={"wan": {"bandwidth": ["10Gbit/s", "20Gbit/s"]}},
        handoff=["catch-up", {"plugin": "one-shot", "config": {"max_relay_tokens": 50}}],
    )
    # With a relay 2 x 2 x 2; without one nothing is handed off, so 2 x 2.
    assert len(kinds) == 12
    assert len({tuple(sorted(family.traits.items())) for family in kinds}) == 12
    wide = [f for f in kinds if f.data["spec"]["pools"]["prefill"]["hardware"] == "16xh100"]
    assert {family.data["spec"]["pools"]["prefill"]["engine"]["config"]["tp"] for family in wide} == {16}


def test_what_the_graph_lacks_cannot_vary() -> None:
    with pytest.raises(PlanError, match='no pool "prefil"') as told:
        made(pools={"prefil": {"replicas": 2}})
    assert told.value.fix == 'did you mean "prefill"?'
    with pytest.raises(PlanError, match="none of the deployments is a right graph"):
        made(pools={"main": {"replicas": 0}})


def test_bounds_are_what_compute_memory_and_link_allow() -> None:
    limits = dict(bounds(made())[0].rates((3, 1, 2)))
    # 500 new tokens take half a second; a step of 64 takes 16.4 ms; 500 kB cross the link for each request.
    assert limits["prefill"] == pytest.approx(3 / 0.5)
    assert limits["decode"] == pytest.approx(3 * 64 / 0.0164 / 100)
    assert limits["link"] == pytest.approx(100e9 / 8 / 500e3)
    slow = Bounds.of(made()[0], DEMAND, dict.fromkeys(("prefill", "relay", "main"), POOL), 0.0125)
    assert dict(slow.rates((3, 1, 2)))["decode"] == pytest.approx(3 * 25 / 0.0125 / 100)
    small = PoolModel(POOL.latency, 64, 512, 10_500, 16, 0.0, 1000.0)
    full = Bounds.of(made()[0], DEMAND, dict.fromkeys(("prefill", "relay", "main"), small), 0.02)
    assert dict(full.rates((3, 1, 2)))["decode"] == pytest.approx(3 * 10 / 0.011 / 100)


def test_bounds_are_of_all_that_is_sent_though_what_is_too_long_is_no_work() -> None:
    twice = Demand((*DEMAND.turns, *(replace(turn, fresh=turn.fresh + 10**6) for turn in DEMAND.turns)))
    within = twice.within(ContextLimit(10_000, "", ("main",)))
    assert within.too_long == pytest.approx(0.5)
    assert twice.within(None) is twice
    half = Bounds.of(made()[0], within, dict.fromkeys(("prefill", "relay", "main"), POOL), 0.02)
    for name, rate in bounds(made())[0].rates((3, 1, 2)):
        assert dict(half.rates((3, 1, 2)))[name] == pytest.approx(2 * rate)


@pytest.mark.parametrize("rate", [1.0, 3.3, 7.0, 11.9, 17.5])
def test_the_cheapest_is_as_cheap_as_trying_everything_finds(rate: float) -> None:
    kinds = made()
    price = cost(kinds)
    every = [Candidate(n, sizes) for n, family in enumerate(kinds) for sizes in product(*family.choices.values())]
    least = min(
        price(each) for each in every if tiers(dict(zip(kinds[each.family].pools, each.sizes, strict=True)), rate)
    )
    looked = trials(kinds, tiers)
    found = cheapest(looked, price, [rate], range(len(kinds)))[rate]
    assert found is not None
    assert price(found) == least
    assert looked.done < len(every) / 5


def test_a_rate_that_nothing_serves_has_no_cheapest() -> None:
    assert cheapest(trials(made(), tiers), cost(made()), [100.0], range(2)) == {100.0: None}
    assert cheapest(trials(made(), lambda sizes, rate: False), cost(made()), [5.0], range(2)) == {5.0: None}


def test_goodput_is_found_to_its_part_wherever_the_guess_was() -> None:
    kinds = made()
    candidate = Candidate(0, (4, 1, 3))
    for guess in (0.01, 5.0, 6.8, 60.0):
        rate = goodputs(trials(kinds, tiers), "", [(candidate, guess)])[candidate]
        assert 6.8 * (1 - EXACT) <= rate <= 6.8
    assert goodputs(trials(kinds, lambda sizes, rate: False), "", [(candidate, 5.0)]) == {candidate: 0.0}


def test_the_best_ratio_is_found_from_a_poor_beginning() -> None:
    kinds = made()
    price = cost(kinds)
    start = Candidate(0, (2, 3, 9))
    best = improved(trials(kinds, tiers), price, Point(start, 3.4, price(start)), by_bcr)
    every = (Candidate(0, sizes) for sizes in product(*kinds[0].choices.values()))
    ratio = max(min(1.7 * each.sizes[0], 20 * each.sizes[2]) / price(each) for each in every)
    assert best.bcr == pytest.approx(ratio, rel=0.03)


def test_the_front_has_no_deployment_that_another_beats() -> None:
    points = [Point(Candidate(0, (n,)), goodput, spent) for n, (goodput, spent) in enumerate([(1, 3), (2, 2), (3, 4)])]
    assert [point.candidate.sizes for point in front([*points, Point(Candidate(1, (9,)), 3, 5)])] == [(1,), (2,)]


def test_neighbours_are_one_step_away_and_within_the_choices() -> None:
    near = list(neighbours((4, 1), {"a": (2, 4, 8), "b": (1, 2)}))
    assert sorted(near) == [(2, 1), (2, 2), (4, 2), (8, 1)]


def _prepare(marks: str) -> Callable[[Trial], Verdict]:
    def work(trial: Trial) -> Verdict:
        if trial.rate < 0:
            raise PddError("a trial failed", why="its rate is below 0", fix="do not ask for it")
        if trial.rate == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return Verdict(trial.rate > 2, {"p90": float(os.getpid())}, {}, (), {}, 0.0, {}, {})

    return work


def asked(*rates: float) -> list[Trial]:
    return [Trial(0, (1,), rate, 100, 0) for rate in rates]


def test_processes_share_trials_answer_in_order_and_tell_what_went_wrong() -> None:
    ended: list[None] = []
    with crew(2, _prepare, "") as workers:
        verdicts = workers.do(asked(*range(1, 21)), lambda: ended.append(None))
        assert [verdict.kept for verdict in verdicts] == [rate > 2 for rate in range(1, 21)]
        assert len(ended) == 20
        assert os.getpid() not in {int(verdict.ttft["p90"]) for verdict in verdicts}
        with pytest.raises(PddError, match="a trial failed") as told:
            workers.do(asked(-1), lambda: None)
        assert told.value.fix == "do not ask for it"
        with pytest.raises(PddError, match="has ended"):
            workers.do(asked(0), lambda: None)
