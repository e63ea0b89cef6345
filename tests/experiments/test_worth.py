from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.errors import PddError
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.worth import Promise, WorthError, read_prices, worth
from pdd_runtime.planner.cost import PriceError
from pdd_runtime.planner.prices import Prices
from tests.experiments.graphs import AGGREGATED, PDD, graph

PRICES = Prices.model_validate({"unit": "X", "nodes": {"H100": 1.0, "H200": [1.2, 1.3]}, "line": 0.35})


def answered(ttft: float, step: float, tokens: int = 5) -> Outcome:
    stamps = [ttft + n * step for n in range(tokens)]
    return Outcome(0, 0, 10, 0.0, 0.0, stamps, [1] * tokens, stamps[-1])


def test_a_promise_is_kept_request_by_request() -> None:
    promise = Promise.parse("ttft=1s, tpot=50ms")
    assert promise == Promise(1.0, 0.05)
    failed = answered(0.1, 0.01)
    failed.error = "it broke"
    kept = [answered(0.9, 0.04), answered(1.1, 0.04), answered(0.9, 0.06), failed, answered(0.9, 9.0, tokens=1)]
    assert [promise.kept(outcome) for outcome in kept] == [True, False, False, False, True]
    assert Promise.parse("tpot=50ms").kept(answered(100.0, 0.04))


@pytest.mark.parametrize("text", ["", "ttft", "ttft=fast", "e2e=1s", "ttft=0s", "ttft=1s,,"])
def test_what_is_no_promise_is_refused(text: str) -> None:
    with pytest.raises(WorthError, match="no promise"):
        Promise.parse(text)


def test_goodput_is_of_the_time_that_requests_were_under_way() -> None:
    outcomes = [answered(0.5, 0.01)] * 6 + [answered(5.0, 0.01)] * 4
    found = worth(outcomes, 20.0, Promise(ttft=1.0))
    assert (found.good, found.goodput, found.cost, found.bcr) == (6, 0.3, None, None)
    assert worth(outcomes, 20.0, Promise()).goodput is None


def test_a_graph_costs_its_nodes_and_lines_and_the_range_of_their_prices() -> None:
    text = PDD.replace("bandwidth: 2Mbit/s", "bandwidth: 20Gbit/s")
    for pool, chips in (("prefill", "16xH100"), ("relay", "8xH100"), ("main", "8xH200")):
        text = text.replace(f"{pool}: {{role: {pool}", f"{pool}: {{hardware: {chips}, role: {pool}")
    found = worth([answered(0.5, 0.01)] * 10, 10.0, Promise(ttft=1.0), graph(text), PRICES, {"wan": 1000})
    # 3 nodes, 1 node, and two lines of 10 Gbit/s.
    assert found.cost == pytest.approx((3 + 1.2 + 0.7, 3 + 1.3 + 0.7))
    assert found.bcr == pytest.approx((1 / 5.0, 1 / 4.9))
    assert found.unit == "X"


def test_a_graph_that_says_not_what_it_runs_on_has_no_price() -> None:
    with pytest.raises(PriceError, match="runs on"):
        worth([answered(0.5, 0.01)], 1.0, Promise(), graph(AGGREGATED), PRICES)


def test_prices_are_a_mapping_or_stand_in_a_plan(tmp_path: Path) -> None:
    alone = tmp_path / "prices.yaml"
    alone.write_text("unit: X\nnodes: {H100: 1.0, H200: [1.2, 1.3]}\nline: 0.35\n")
    assert read_prices(alone) == PRICES
    alone.write_text("unit: X\nnodes: {H100: cheap}\n")
    with pytest.raises(PddError) as error:
        read_prices(alone)
    assert "prices.yaml:2" in error.value.where
    plan = Path(__file__).parents[2] / "examples" / "plan" / "report.yaml"
    assert read_prices(plan).nodes
