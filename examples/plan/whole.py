"""How much a plan's search misses: beside it, every deployment of the plan is measured.

    python examples/plan/whole.py [PLAN] [--set PATH=VALUE]... [--processes N]

By default a part of h100-h200.yaml, 120 deployments, for the best ratio of goodput to cost. All are measured with the
seed that the search has; the best twelve of them, and the one that the search found, with those of its finals."""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from pdd_runtime.planner.plan_report import pools, ranged, traits
from pdd_runtime.planner.search.crew import crew
from pdd_runtime.planner.search.finals import Finals
from pdd_runtime.planner.search.find import Finder
from pdd_runtime.planner.search.goodput import goodputs
from pdd_runtime.planner.search.point import Candidate, Point
from pdd_runtime.planner.search.setting import Setting, judge
from pdd_runtime.planner.search.worth import Worth

PLAN = Path(__file__).parent / "h100-h200.yaml"
PART = (
    "spec.goodput=null",
    "spec.pools.prefill.replicas=2..5",
    "spec.pools.relay={replicas: 0..1, hardware: 4xh100}",
    "spec.pools.main.replicas=2..6",
    "spec.links.wan.bandwidth=[40Gbit/s, 60Gbit/s, 80Gbit/s]",
    "spec.effort={span: 60s, requests: 400}",
)
LONGER = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    overrides = (*(PART if asked.plan is None else ()), *asked.set)
    path = str(asked.plan or PLAN)
    setting = Setting.read(path, overrides)
    with crew(asked.processes, judge, path, overrides) as workers:
        finder = Finder(setting, workers, lambda what, done: None)
        found = finder.find()
        worth = Worth(setting, finder.trials)
        every = {
            candidate: worth.guess(candidate)
            for family in setting.families[: setting.choices]
            for sizes in product(*family.choices.values())
            for candidate in (Candidate(family.number, sizes),)
        }
        rates = goodputs(finder.trials, "", every.items())
        points = [worth.capped(Point(each, rate, worth.cost(each))) for each, rate in rates.items() if rate > 0]
        best = list[Point]()
        while points and len(best) < LONGER:
            best.append(worth.best(points))
            points.remove(best[-1])
        best += [Point(found.best.candidate, found.best.goodput, worth.cost(found.best.candidate))]
        shown, _ = Finals(setting, finder.trials, worth).measured(best, {})
    again = {Point(each.candidate, each.goodput, worth.cost(each.candidate)): each for each in shown}
    whole = again[worth.best(list(again))]
    same = next(each for each in shown if each.candidate == found.best.candidate)
    for title, one in (("the search's best", same), ("the best of all", whole)):
        figures = f"{one.goodput:.3g} requests/s for {ranged(one.cost.total)} {setting.plan.spec.prices.unit}"
        print(f"{title}: {pools(one)}, {traits(one)}: {figures}, {ranged(one.bcr, '.3g')} for each")
    print(f"of {len(every)} deployments by {found.trials} simulations; all of them took {finder.trials.done}")


if __name__ == "__main__":
    main()
