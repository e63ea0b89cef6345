"""The search against all deployments there are, on spaces of three shapes. Goodput is known by a formula, without
noise, so that what differs is the search's fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from pdd_runtime.planner.search.crew import Alone
from pdd_runtime.planner.search.find import Finder, Found
from pdd_runtime.planner.search.goodput import EXACT
from pdd_runtime.planner.search.point import Candidate, Point
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.trial import Trial, Verdict
from tests.planner.test_plan import GRAPH, PROFILE

PLAN = """
apiVersion: pdd/v1alpha1
kind: Plan
metadata: {name: whole}
spec:
  graph: graph.yaml
  profile: profile.yaml
  workload: "prompt=1000,output=200,hit=0.5,prefixes=4"
  prices: {nodes: {h100: {price: 2, chips: 8}, h200: {price: 1.5, chips: 8}}, line: 1}
  pools: {prefill: {replicas: 1..12}, relay: {replicas: 0..2}, main: {replicas: 1..8}}
  links: {wan: {bandwidth: [10Gbit/s, 20Gbit/s, 40Gbit/s]}}
  effort: {span: 4s, requests: 100, final: 1, seeds: 2}
"""
DEPLOYMENTS = 3 * 12 * 3 * 8
Margin = Callable[[Mapping[str, int], float, float], float]
"""Of workers by pool, the link in Gbit/s and a rate: the worst P90 over what was promised."""


def separate(count: Mapping[str, int], link: float, rate: float) -> float:
    """What is scarcest decides, and nothing else matters; a relay gives prefill a little."""
    prefill = 1.5 * count["prefill"] * (1.06 if count.get("relay") else 1.0)
    return max(rate / prefill, rate / (2.5 * count["main"]), rate / (0.45 * link))


def queues(count: Mapping[str, int], link: float, rate: float) -> float:
    """Waits add up: less of one is made good by more of another. A relay has its own instead of the link's."""
    waits = [(0.6, rate * 0.61 / count["prefill"])]
    waits.append((2.0 / link, rate * 2.05 / link) if not count.get("relay") else (0.1, rate * 0.05 / count["relay"]))
    load = max(use for _, use in waits)
    main = rate * 0.36 / count["main"]
    if max(load, main, rate * 2.05 / link) >= 1:
        return 2.0 + max(load, main, rate * 2.05 / link)
    ttft = sum(time / (1 - use) for time, use in waits)
    return max(ttft / 1.6, (0.02 + 0.03 * main) / 0.045)


def caches(count: Mapping[str, int], link: float, rate: float) -> float:
    """More prefill workers hold more of what is asked again, so that each has less to do; more mains hold less each, so
    that more crosses the link: more workers may serve less. Eight main workers lie in few nodes."""
    seconds = 0.1 + (1 - 0.5 * min(1.0, count["prefill"] / 6))
    gigabits = 2.05 * (2 - 1 / math.sqrt(count["main"]))
    hidden = 0.8 if count.get("relay") else 1.0
    crossing = rate * gigabits * hidden / link
    return max(rate * seconds / count["prefill"], rate * 0.36 / count["main"], crossing)


def _judge(margin: Margin, setting: Setting, trial: Trial) -> Verdict:
    family = setting.families[trial.family]
    count = dict(zip(family.pools, trial.sizes, strict=True))
    worst = margin(count, family.smallest.spec.links["wan"].bandwidth / 1e9, trial.rate)
    times = {"p50": worst, "p90": worst, "p99": worst}
    missed = ("ttft",) if worst > 1 else ()
    return Verdict(not missed, times, times, missed, dict.fromkeys(count, 0.5), 0.0, {}, {}, worst)


def search(directory: Path, margin: Margin, *overrides: str) -> tuple[Finder, Found]:
    profile = PROFILE.replace("kv_token: 1000", "kv_token: 500000")
    for name, text in (("graph", GRAPH.replace("1xh100", "4xh100")), ("profile", profile), ("plan", PLAN)):
        (directory / f"{name}.yaml").write_text(text)
    setting = Setting.read(directory / "plan.yaml", overrides)
    finder = Finder(setting, Alone(partial(_judge, margin, setting)), lambda what, done: None)
    return finder, finder.find()


def whole(finder: Finder, margin: Margin) -> list[Point]:
    """All deployments, with their goodput by bisection over the formula, within the bounds that the search believes."""
    points = []
    for family in finder.setting.families[: finder.setting.choices]:
        link = family.smallest.spec.links["wan"].bandwidth / 1e9
        for sizes in product(*family.choices.values()):
            count = dict(zip(family.pools, sizes, strict=True))
            low, high = 0.0, 100.0
            while high - low > 1e-4:
                rate = (low + high) / 2
                low, high = (rate, high) if margin(count, link, rate) <= 1 else (low, rate)
            candidate = Candidate(family.number, sizes)
            points.append(Point(candidate, low, finder.cost(candidate)))
    return points


SHAPES = pytest.mark.parametrize("margin", [separate, queues, caches])


@SHAPES
def test_the_bounds_are_above_every_goodput(tmp_path: Path, margin: Margin) -> None:
    finder, found = search(tmp_path, margin)
    every = whole(finder, margin)
    assert found.deployments == len(every) == DEPLOYMENTS
    for point in every:
        assert point.goodput <= finder.setting.bounds[point.candidate.family].rate(point.candidate.sizes)


@SHAPES
def test_the_best_ratio_is_that_of_all(tmp_path: Path, margin: Margin) -> None:
    finder, found = search(tmp_path, margin)
    most = max(point.bcr for point in whole(finder, margin))
    assert found.best.bcr.low >= (1 - 2 * EXACT) * most
    assert found.trials < DEPLOYMENTS


@SHAPES
@pytest.mark.parametrize("budget", [8, 14, 22, 30])
def test_the_most_for_a_budget_is_that_of_all(tmp_path: Path, margin: Margin, budget: int) -> None:
    finder, found = search(tmp_path, margin, f"spec.budget={budget}")
    most = max(point.goodput for point in whole(finder, margin) if point.cost <= budget)
    assert found.best.cost.total.low <= budget
    assert found.best.goodput >= (1 - 2 * EXACT) * most


@SHAPES
@pytest.mark.parametrize("need", [1.5, 4.0, 7.5, 11.0])
def test_the_cheapest_that_serves_enough_is_that_of_all(tmp_path: Path, margin: Margin, need: float) -> None:
    finder, found = search(tmp_path, margin, f"spec.goodput={need}")
    least = min(point.cost for point in whole(finder, margin) if point.goodput >= need)
    assert found.best.goodput >= (1 - 2 * EXACT) * need
    assert found.best.cost.total.low <= least
