"""The graphs that come along, simulated as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdd_runtime.graph import PluginRef, load
from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.profile import LinkProfile, PoolProfile, Profile
from pdd_runtime.planner.simulate import Failure, LinkModel, Scenario, SimulationError, measured_links, simulate
from pdd_runtime.plugins import PluginManager

GRAPHS = Path(__file__).parents[3] / "graphs"
TALKS = Workload(prompt=2000, output=60, hit=0.5, turns="uniform(1, 4)", new=200, think=2, rate=2.0)


@pytest.mark.parametrize("name", ["quickstart", "pd-cross", "pd-intra", "aggregated", "two-by-two", "h100-h200"])
def test_every_form_of_graph_answers_all(
    name: str, pool_model: Callable[..., PoolModel], plugins: PluginManager
) -> None:
    graph = load(GRAPHS / f"{name}.yaml").graph
    scenario = Scenario(graph, dict.fromkeys(graph.spec.pools, pool_model(kv_token=1000.0)), plugins)
    made = simulate(scenario, TALKS, requests=200)
    assert made.answered == 200
    assert (sum(made.link_bytes.values()) > 0) == any(edge.link for edge in graph.spec.edges)


def test_two_datacenters_share_the_work_of_two_others(
    pool_model: Callable[..., PoolModel], plugins: PluginManager
) -> None:
    """Each of them has its own link to each of the others, and one of the links is slow."""
    graph = load(GRAPHS / "two-by-two.yaml", ["spec.routing={plugin: never-relay}"]).graph
    pools = dict.fromkeys(graph.spec.pools, pool_model())
    slow = next(iter(graph.spec.links))
    workload = Workload(prompt=1000, output=60, rate=2.0)
    alike, one_slow = (
        simulate(Scenario(graph, pools, plugins, links=links), workload, requests=400)
        for links in (
            {name: LinkModel(2e8, 0.02) for name in graph.spec.links},
            {name: LinkModel(1e6 if name == slow else 2e8, 0.02) for name in graph.spec.links},
        )
    )
    crossed = [sent for name, sent in alike.link_bytes.items() if name != "metro"]
    assert min(crossed) > 0.15 * sum(crossed)
    # The policy sees its goodput, and goes round it.
    assert one_slow.link_bytes[slow] < 0.25 * alike.link_bytes[slow]


def test_a_cluster_that_is_lost_is_done_without(pool_model: Callable[..., PoolModel], plugins: PluginManager) -> None:
    graph = load(GRAPHS / "two-by-two.yaml").graph
    lost = graph.spec.pools[next(name for name, pool in graph.spec.pools.items() if pool.role == "main")].cluster
    failures = tuple(
        Failure(at=30.0, duration=1e6, name=name, index=index)
        for name, pool in graph.spec.pools.items()
        if pool.cluster == lost
        for index in range(pool.replicas)
    )
    scenario = Scenario(graph, dict.fromkeys(graph.spec.pools, pool_model()), plugins, failures=failures)
    made = simulate(scenario, Workload(prompt=500, output=60, rate=1.0), requests=200)
    assert (made.answered, made.failed, made.rejected) == (200, 0, 0)


def test_a_pool_of_which_nothing_is_known_is_told(pool_model: Callable[..., PoolModel], plugins: PluginManager) -> None:
    graph = load(GRAPHS / "quickstart.yaml").graph
    with pytest.raises(SimulationError, match="pool relay"):
        simulate(
            Scenario(graph, {"prefill": pool_model(), "main": pool_model()}, plugins),
            Workload(prompt=100, output=5, rate=1.0),
            requests=1,
        )


def test_links_are_as_fast_as_they_were_measured() -> None:
    graph = load(GRAPHS / "quickstart.yaml").graph
    pool = PoolProfile(latency=PluginRef(plugin="roofline"))
    profile = Profile(
        pools={"main": pool},
        links={"wan": LinkProfile(rtt="70ms", goodput="80Mbit/s"), "other": LinkProfile(rtt="10ms")},
    )
    assert measured_links(graph, profile) == {"wan": LinkModel(10e6, graph.spec.links["wan"].rtt)}
