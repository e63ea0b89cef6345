"""Does a relay pay: with deployments whose goodput is known by a formula."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from pdd_runtime.cli.plan import tables
from pdd_runtime.planner.plan_html import to_html
from pdd_runtime.planner.plan_report import PlanReport
from pdd_runtime.planner.search.crew import Alone
from pdd_runtime.planner.search.find import Finder, Found
from pdd_runtime.planner.search.relay import RelayPays
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.trial import Trial, Verdict
from tests.planner.test_plan import GRAPH, PLAN, PROFILE

Hidden = Callable[[int], float]
"""By seed, what a prefill worker serves where a relay hides the link, as a part of what it serves without."""
NO_RELAY = GRAPH.replace(
    "    relay: {role: relay, cluster: dc-a, hardware: 1xh100, engine: {plugin: scripted}}\n", ""
).replace("    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}\n", "").replace(
    "    - {from: relay, to: main, carries: tokens, link: wan}\n", ""
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, text in (("graph", GRAPH), ("profile", PROFILE), ("plan", PLAN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "plan.yaml"


def _judge(hidden: Hidden, setting: Setting, trial: Trial) -> Verdict:
    """A prefill worker serves 1 request/s, times `hidden` beside a relay; a main worker 20."""
    count = dict(zip(setting.families[trial.family].pools, trial.sizes, strict=True))
    more = hidden(trial.seed) if "relay" in count else 1.0
    lot = 1 + 0.01 * (trial.seed % 3)  # some seeds are easier for all
    load = max(trial.rate / (more * lot * count["prefill"]), trial.rate / (20 * count["main"]))
    times = {"p50": load, "p90": load, "p99": load}
    missed = ("ttft",) if load > 1 else ()
    share = 0.06 if "relay" in count else 0.0
    return Verdict(
        not missed, times, times, missed, dict.fromkeys(count, load), share, {}, {"wan": 5e5 * trial.rate}, load
    )


def report(path: Path, hidden: Hidden, *overrides: str) -> PlanReport:
    setting = Setting.read(path, overrides)
    found = Finder(setting, Alone(partial(_judge, hidden, setting)), lambda what, done: None).find()
    return PlanReport(setting, found, None)


def found(path: Path, hidden: Hidden, *overrides: str) -> Found:
    return report(path, hidden, *overrides).found


def pools(answer: RelayPays) -> tuple[set[str], set[str]]:
    assert answer.without is not None
    assert answer.beside is not None
    return set(answer.without.family.pools), set(answer.beside.family.pools)


@pytest.mark.parametrize("goal", ["spec.budget=60", "spec.goodput=3.9", "spec.effort.span=4s"])
@pytest.mark.parametrize(("gain", "verdict"), [(1.6, "pays"), (0.8, "does not pay")])
def test_a_relay_pays_where_it_brings_more_than_it_costs(
    path: Path,
    goal: str,
    gain: float,
    verdict: str,
) -> None:
    prices = "spec.prices.nodes={h100: {price: 2, chips: 1}, h200: 1}"  # no chips of a node are left for the relay
    more = "spec.effort.seeds=4", "spec.pools.prefill.replicas=1..9"
    answer = found(path, lambda seed: gain, goal, prices, *more).relay
    assert pools(answer) == ({"prefill", "main"}, {"prefill", "relay", "main"})
    assert answer.verdict == verdict
    assert answer.compared == ""


def test_the_difference_is_that_of_pairs_though_seeds_differ(path: Path) -> None:
    answer = found(path, lambda seed: 1.3, "spec.effort.seeds=6", "spec.pools.main.replicas=3").relay
    assert answer.bcr is not None
    assert answer.goodput is not None
    assert answer.without is not None
    assert answer.beside is not None
    alone = answer.without.interval
    assert alone.high / alone.low - 1 > 0.01
    assert set(answer.without.rates) == set(answer.beside.rates) == {1, 2, 3, 4, 5, 6}
    low, high = answer.goodput.interval
    true = 1.3 * answer.beside.candidate.sizes[0] / answer.without.candidate.sizes[0] - 1
    assert low - 0.02 < true < high + 0.02
    assert high - low < 0.03


def test_what_only_some_seeds_say_is_no_difference(path: Path) -> None:
    told = report(
        path, lambda seed: 1.25 if seed % 2 else 0.8, "spec.prices.nodes={h100: {price: 2, chips: 1}, h200: 1}"
    )
    assert told.found.relay.verdict == "no difference shown"
    assert told.relay_sentence.startswith("No difference is shown")


def test_a_plan_that_always_has_a_relay_is_compared_with_none(path: Path) -> None:
    told = report(path, lambda seed: 0.5, "spec.pools.relay.replicas=1..2")
    answer = told.found.relay
    assert answer.compared == "without"
    assert answer.verdict == "does not pay"
    assert pools(answer)[0] == {"prefill", "main"}
    assert "relay" in told.found.best.family.pools
    assert all("relay" in each.family.pools for each in told.found.front)
    assert told.found.deployments == 3 * 2 * 3
    assert "The plan does not allow one without a relay" in told.relay_sentence


def test_a_plan_that_has_no_relay_is_compared_with_the_graphs(path: Path) -> None:
    answer = found(path, lambda seed: 2.0, "spec.pools.relay.replicas=0")
    assert answer.relay.compared == "with"
    assert answer.relay.verdict == "pays"
    assert answer.relay.beside is not None
    assert answer.relay.beside.graph.spec.pools["relay"].replicas == 1
    assert "relay" not in answer.best.family.pools


def test_a_graph_without_a_relay_cannot_tell(path: Path) -> None:
    (path.parent / "graph.yaml").write_text(NO_RELAY)
    told = report(path, lambda seed: 2.0, "spec.pools={prefill: {replicas: 1..3}}")
    assert told.found.relay.verdict == "not known"
    assert "no pool of role relay" in told.relay_sentence
    assert told.found.relay.without is not None


def test_a_relay_that_has_no_price_cannot_be_compared_with(path: Path) -> None:
    (path.parent / "graph.yaml").write_text(GRAPH.replace("1xh100", "1xb200"))
    told = report(path, lambda seed: 2.0, "spec.pools.relay.replicas=0")
    assert told.found.relay.verdict == "not known"
    assert "b200 has no price" in told.relay_sentence


def test_where_only_a_relay_keeps_the_promise_it_pays(path: Path) -> None:
    told = report(path, lambda seed: 1.5, "spec.goodput=4")
    answer = told.found.relay
    assert answer.without is None
    assert answer.verdict == "pays"
    assert re.match(r"A relay pays\. Without one: no deployment serves 4 .*the most found is", told.relay_sentence)
    told = report(path, lambda seed: 0.5, "spec.goodput=2.5")
    assert told.found.relay.beside is None
    assert told.found.relay.verdict == "does not pay"


def test_a_cheaper_one_that_may_serve_too_little_shows_nothing(path: Path) -> None:
    seeds = {0: 1.2, 1: 1.2, 2: 0.95}
    prices = "spec.prices.nodes={h100: {price: 2, chips: 1}, h200: 1}"
    told = report(path, lambda seed: seeds.get(seed, 1.12), "spec.goodput=2.2", prices)
    answer = told.found.relay
    assert answer.verdict == "no difference shown"
    assert answer.cost is not None
    assert answer.cost.interval.high < 0
    assert "It is not sure whether a relay pays" in told.relay_sentence


def test_a_budget_pays_for_what_is_sent(path: Path) -> None:
    (path.parent / "graph.yaml").write_text(GRAPH.replace("rtt: 10ms", "rtt: 10ms, price: 1"))
    prices = "spec.prices.nodes={h100: {price: 2, chips: 1}, h200: 1}"
    best = found(path, lambda seed: 1.0, prices, "spec.budget=18.4").best
    # 17.5 for 8 + 8 chips and a line; 500 kB for each request make 1.8 an hour for each request/s.
    assert best.candidate.sizes == (1, 1)
    assert best.goodput == pytest.approx(0.5)
    assert best.cost.total.middle == pytest.approx(18.4)
    priced = report(path, lambda seed: 1.0, prices).found.best
    assert priced.cost.traffic.low == pytest.approx(1.8 * priced.goodput)


def test_table_json_and_page_say_it(path: Path) -> None:
    told = report(path, lambda seed: 1.6, "spec.prices.nodes={h100: {price: 2, chips: 1}, h200: 1}")
    answer = told.found.relay
    assert answer.bcr is not None
    console = Console(width=200)
    with console.capture() as captured:
        console.print(tables(told))
    printed = captured.get()
    assert "Does a relay pay?" in printed
    assert re.search(r"\nwithout: .*no relay", printed)
    assert f"{answer.bcr.middle:+.1%}" in printed
    assert told.relay_sentence in " ".join(printed.split())
    data = told.to_json()["relay"]
    assert data["verdict"] == "pays"
    assert data["difference"]["bcr"]["ci"] == list(answer.bcr.interval)
    assert answer.beside is not None
    assert data["with"]["goodput_by_seed"] == answer.beside.rates
    page = to_html(told)
    assert "does a relay pay?" in page
    assert told.relay_sentence in page
