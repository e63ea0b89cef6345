from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pdd_runtime.graph import loads
from pdd_runtime.planner.cost import Inventory, PriceError, bcr, cost, graph_cost, inventory_of, lines_of
from pdd_runtime.planner.prices import Prices, Range

REPORT = Prices.model_validate({"unit": "X", "nodes": {"H100": 1, "H200": [1.2, 1.3]}, "line": 0.35})
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: priced}
spec:
  model: {source: any}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 20Gbit/s, rtt: 30ms, price: 0.02}}
  pools:
    prefill: {role: prefill, cluster: dc-a, replicas: 10, hardware: 4x8xh100, engine: {plugin: scripted}}
    relay: {role: relay, cluster: dc-a, hardware: 4xh100, engine: {plugin: scripted}}
    main: {role: main, cluster: dc-b, replicas: 16, hardware: 2x8xH200, engine: {plugin: scripted}}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
"""


def test_the_reports_costs_and_ratios_come_out_exactly() -> None:
    pdd = cost(Inventory({"H100": 43, "H200": 32}, lines=1), REPORT).total
    assert pdd == Range(pytest.approx(81.75), pytest.approx(84.95))
    one_place = cost(Inventory({"H100": 88}), REPORT)
    assert one_place.total == Range(88, 88)
    ratio, baseline = bcr(11.5, pdd), bcr(9.0, one_place)
    assert [round(value, 4) for value in (ratio.high, ratio.low, baseline.low)] == [0.1407, 0.1354, 0.1023]
    assert round(100 * (ratio.high / baseline.low - 1), 1) == 37.5
    assert round(100 * (ratio.low / baseline.low - 1), 1) == 32.4


def test_a_graph_is_bought_in_whole_nodes_that_its_pools_share() -> None:
    inventory = inventory_of(loads(GRAPH).graph, REPORT)
    assert inventory.nodes == {"h100": 41, "h200": 32}
    assert inventory.lines == 2
    assert inventory_of(loads(GRAPH, ["spec.pools.relay.replicas=3"]).graph, REPORT).nodes["h100"] == 42


def test_nodes_in_two_clusters_are_not_shared() -> None:
    graph = loads(GRAPH, ["spec.pools.main.hardware=4xh100", "spec.pools.main.replicas=1"]).graph
    assert inventory_of(graph, REPORT).nodes == {"h100": 42}


def test_energy_and_what_is_sent_are_paid_for() -> None:
    prices = Prices.model_validate(
        {
            "nodes": {"H100": {"price": 20, "power": 10}, "H200": {"price": 30, "power": 8}},
            "line": {"price": 5, "bandwidth": "20Gbit/s"},
            "energy": {"price": 0.1, "pue": 1.5},
        }
    )
    spent = graph_cost(loads(GRAPH).graph, prices, {"wan": 3e12})
    assert spent.nodes.low == 41 * 20 + 32 * 30
    assert spent.lines.low == 5
    assert spent.energy.low == pytest.approx((41 * 10 + 32 * 8) * 1.5 * 0.1)
    assert spent.traffic.low == pytest.approx(3000 * 0.02)
    assert spent.total.low == pytest.approx(820 + 960 + 5 + 99.9 + 60)


@given(st.integers(1, 400))
def test_a_link_is_made_of_as_many_lines_as_carry_it(gigabits: int) -> None:
    lines = lines_of(gigabits * 1e9, REPORT)
    assert (lines - 1) * 10 < gigabits <= lines * 10


def test_what_has_no_price_is_told_with_the_nearest_that_has_one() -> None:
    with pytest.raises(PriceError, match="H1O0 has no price") as told:
        cost(Inventory({"H1O0": 1}), REPORT)
    assert "H100" in told.value.fix
    with pytest.raises(PriceError, match='nothing says what pool "relay" runs on') as told:
        inventory_of(loads(GRAPH, ["spec.pools.relay.hardware=null"]).graph, REPORT)
    assert told.value.where == "spec.pools.relay"
    with pytest.raises(PriceError, match='"8 boxes" is no hardware'):
        inventory_of(loads(GRAPH, ["spec.pools.relay.hardware=8 boxes"]).graph, REPORT)
    with pytest.raises(PriceError, match="costs nothing"):
        bcr(1.0, Range(0, 0))


@pytest.mark.parametrize("wrong", [[2, 1], [1], "1", True, -1, [1, 2, 3], float("inf"), float("nan")])
def test_what_is_no_price_is_refused(wrong: object) -> None:
    with pytest.raises(ValidationError):
        Prices.model_validate({"nodes": {"H100": wrong}})
