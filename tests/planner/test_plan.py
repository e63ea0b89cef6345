from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from pdd_runtime.errors import PddError
from pdd_runtime.graph import loads
from pdd_runtime.planner.plan_html import to_html
from pdd_runtime.planner.plan_report import PlanReport
from pdd_runtime.planner.plan_spec import PlanError
from pdd_runtime.planner.search.crew import Alone
from pdd_runtime.planner.search.find import Finder, Found
from pdd_runtime.planner.search.otherwise import what_if
from pdd_runtime.planner.search.setting import Setting, judge
from pdd_runtime.planner.search.trial import Change, Trial, Verdict
from tests.graphs import pdd

GRAPH = pdd(
    "given",
    "slo: {ttft_p90: 5s, tpot_p90: 50ms}",
    'discovery: {plugin: etcd, config: {endpoints: ["http://127.0.0.1:2379"]}}',
    prefill="hardware: 8xh100",
    relay="hardware: 1xh100",
    main="replicas: 2, hardware: 8xh200",
    wan="bandwidth: 1Gbit/s, rtt: 10ms",
)
PROFILE = """
pools:
  prefill: &worker
    latency:
      plugin: table
      config:
        prefill: {tokens: [1, 1001], context: [0], seconds: [[0.101], [1.101]]}
        decode: {tokens: [1, 11], context: [0], seconds: [[0.0105], [0.0155]]}
    capacity: 1000000
    kv_constant: 0
    kv_token: 1000
    batch_limit: 8
  relay: *worker
  main: *worker
"""
PLAN = """
apiVersion: pdd/v1alpha1
kind: Plan
metadata: {name: found}
spec:
  graph: graph.yaml
  profile: profile.yaml
  workload: "prompt=1000,output=20,hit=0.5,prefixes=4"
  prices: {nodes: {h100: 2, h200: 1}, line: 0.5}
  pools: {prefill: {replicas: 1..3}, relay: {replicas: 0..1}, main: {replicas: 1..3}}
  effort: {span: 4s, requests: 100, final: 1, seeds: 2}
"""


ONE = "spec.pools={prefill: {replicas: 2}, relay: {replicas: 0..1}}"
"""Two deployments to choose from."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, text in (("graph", GRAPH), ("profile", PROFILE), ("plan", PLAN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "plan.yaml"


def formula(setting: Setting, trial: Trial) -> Verdict:
    """As if: a prefill worker reads 20 requests/s when half of the prompt is cached, and a main worker answers 45."""
    kept = math.prod(change.times for change in trial.changes if not change.link)
    count = dict(zip(setting.families[trial.family].pools, trial.sizes, strict=True))
    load = max(trial.rate * (2 - kept) / (20 * count["prefill"]), trial.rate / (45 * count["main"]))
    ttft = {"p50": 0.1, "p90": 0.1 / max(0.001, 1 - load), "p99": 0.2}
    margin = ttft["p90"] / (setting.slo.ttft_p90 or 1)
    times = dict.fromkeys(ttft, 0.01)
    hits = {"prefill": 0.5 * kept, "main": 0.5 * kept}
    missed = ("ttft",) if margin > 1 else ()
    return Verdict(not missed, ttft, times, missed, dict.fromkeys(count, load), 0.0, hits, {"wan": 5e5}, margin)


def found(path: Path, *overrides: str) -> Found:
    return search(path, *overrides)[1]


def search(path: Path, *overrides: str) -> tuple[Finder, Found]:
    setting = Setting.read(path, overrides)
    finder = Finder(setting, Alone(partial(formula, setting)), lambda what, done: None)
    return finder, finder.find()


def test_a_plan_finds_a_deployment_that_keeps_its_promise_and_is_worth_most(path: Path) -> None:
    finder, answer = search(path)
    best = answer.best
    assert best in answer.front
    assert best.verdict.ttft["p90"] <= 5
    assert best.verdict.tpot["p90"] <= 0.05
    assert max(each.bcr.low for each in answer.front) <= 1.1 * best.bcr.low
    assert answer.given is not None
    assert best.bcr.low >= answer.given.bcr.low
    costs = [each.cost.total.low for each in answer.front]
    assert costs == sorted(costs)

    others = what_if(finder, answer)
    assert {each.name for each in others.binds} >= {"prefill", "main", "wan"}
    falls = [fall.goodput for fall in others.falls]
    assert falls[0] > falls[-1] > 0
    assert others.falls[0].hits["main"] > others.falls[-1].hits["main"]
    assert {each.what for each in others.priced} == {
        f"{name} × {times}" for name in ("h100", "h200", "line") for times in (0.8, 1.25)
    }

    report = PlanReport(finder.setting, answer, others)
    graph = loads(report.graph_yaml()).graph
    assert graph.name == "found"
    assert {name: pool.replicas for name, pool in graph.spec.pools.items()} == {
        name: pool.replicas for name, pool in best.graph.spec.pools.items()
    }
    assert report.to_json()["best"]["goodput"] == best.goodput
    page = to_html(report)
    assert page.count("<svg") == 3
    assert "nan" not in page


def test_a_trial_has_the_same_verdict_in_every_process(path: Path) -> None:
    trial = Trial(0, (1, 1, 1), 1.5, 100, 3)
    here, there = Setting.read(path).verdict(trial), judge(str(path), ())(trial)
    assert here == there
    assert here.kept
    assert 0 < here.ttft["p50"] < here.ttft["p90"] <= 5
    assert judge(str(path), ())(trial._replace(seed=4)) != here


def test_what_a_trial_changes_is_changed(path: Path) -> None:
    judged = Setting.read(path).verdict
    trial = Trial(0, (1, 1, 1), 1.5, 100, 3)
    fewer = judged(trial._replace(changes=(Change(times=0.5),)))
    assert fewer.hits["prefill"] == pytest.approx(judged(trial).hits["prefill"] / 2, rel=0.1)
    slow = judged(trial._replace(changes=(Change("wan", 0.1),)))
    assert slow.busy["wan"] > 5 * judged(trial).busy["wan"]


def test_goodput_and_budget_are_kept(path: Path) -> None:
    little, much = (found(path, f"spec.budget={budget}").best for budget in (4, 9))
    assert little.cost.total.low <= 4 < much.cost.total.low <= 9
    assert little.goodput < much.goodput
    needed = (little.goodput + much.goodput) / 2
    enough = found(path, f"spec.goodput={needed}").best
    assert enough.goodput >= 0.95 * needed
    assert little.cost.total.low < enough.cost.total.low <= much.cost.total.low


def test_hardware_of_which_nothing_is_known_is_left_out_and_told(path: Path) -> None:
    (path.parent / "plan.yaml").write_text(PLAN.replace("  profile: profile.yaml\n", ""))
    known = "spec.models={toy: {like: llama-3.1-8b}}"
    prices = "spec.prices.nodes={h100: 2, h200: 1, h900: 1}"
    with pytest.raises(PddError, match='pool prefill: no figures of a chip called "h900"') as told:
        Setting.read(path, [known, prices, "spec.pools.prefill.hardware=8xh900"])
    assert told.value.where == "--set spec.pools.prefill.hardware=8xh900"
    finder, answer = search(path, known, prices, "spec.pools.prefill.hardware=[8xh100, 8xh900]")
    left_out = [each for each in PlanReport(finder.setting, answer, None).sentences if "Left out" in each]
    assert len(left_out) == 1
    assert '"h900"' in left_out[0]
    assert PlanReport(finder.setting, answer, None).to_json()["left_out"] == list(finder.setting.left_out)


def test_what_is_longer_than_the_context_is_told_before_anything_is_searched(path: Path) -> None:
    limit = "spec.set=[spec.pools.main.engine.config.context_length=4096]"
    few, many = (f'spec.workload="prompt=choice(1000:{1 - share}, 200000:{share}),output=20"' for share in (0.05, 0.2))
    with pytest.raises(PlanError, match=r"\d\d\.\d\d% of the requests are longer than the context") as told:
        Setting.read(path, [limit, many])
    assert "pool main takes 4,096 tokens" in told.value.why
    assert "engine.config.context_length in the graph" in told.value.why

    finder, answer = search(path, limit, few)
    warning = finder.setting.too_long(answer.best.candidate.family)
    assert warning is not None
    assert warning.what in PlanReport(finder.setting, answer, None).sentences[1]
    assert Setting.read(path, ["spec.workload=prompt=1000,output=20"]).too_long(0) is None


def test_kinds_whose_context_is_too_short_are_left_out(path: Path) -> None:
    kinds = [f"{{hardware: 8xh100, config: {{context_length: {tokens}}}}}" for tokens in (512, 4096)]
    setting = Setting.read(path, [f"spec.pools.prefill.hardware=[{', '.join(kinds)}]"])
    assert setting.choices == Setting.read(path).choices
    (reason,) = setting.left_out
    assert "pool prefill takes 512 tokens" in reason


def test_a_promise_without_further_tokens_is_told_as_well(path: Path) -> None:
    setting = Setting.read(path, ["spec.slo.ttft_p90=1ms", "spec.workload=prompt=1000,output=1", ONE])
    finder = Finder(setting, Alone(setting.verdict), lambda what, done: None)
    with pytest.raises(PddError, match="nearly idle the best has a P90 of") as told:
        finder.find()
    assert "each token" not in told.value.why


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("spec.pools.prefil.replicas=2", ["--set", 'no pool "prefil"', 'did you mean "prefill"?']),
        ("spec.graph=nowhere.yaml", ["--set", "nowhere.yaml cannot be read", "no such file"]),
        ("spec.profile=nowhere.yaml", ["--set", "nowhere.yaml cannot be read", "relative to the plan"]),
        ("spec.prices.nodes={h100: 2}", ["h200 has no price", "add h200: PRICE"]),
        ("spec.workload=nothing", ["--set", "workload nothing cannot be read", "one that is known: agents"]),
        ("spec.pools.prefill.replicas=0", ["no whole route", "let prefill have workers, e.g. replicas: 1..8"]),
        ("spec.routing=hit-treshold", ["--set", "routing policy called", 'did you mean "hit-threshold"?']),
        (
            "spec.handoff={plugin: catch-up, config: {treshold: 9}}",
            ["--set", 'no setting "treshold"', 'did you mean "threshold"?'],
        ),
        ("spec.slo.ttft_p90=1ms", ["no deployment keeps the SLO", "nearly idle", "promise less"]),
        ("spec.budget=1", ["no deployment costs at most 1", "the cheapest found that keeps the SLO costs"]),
        ("spec.goodput=900", ["no deployment serves 900", "the most found is"]),
    ],
)
def test_what_cannot_be_is_told_with_the_way_out(path: Path, change: str, words: list[str]) -> None:
    with pytest.raises(PddError) as told:
        found(path, change)
    for word in words:
        assert word in str(told.value)
