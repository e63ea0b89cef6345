"""What deployments are worth by what a plan asks for: a goodput, the most for a budget, or the best ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdd_runtime.planner.search.cheapest import FILL
from pdd_runtime.planner.search.point import Candidate, Point
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.trials import Trials

SHORT = 0.03
"""By which part a longer measurement may fall short of the goodput that is needed."""


class Worth:
    """By the middle of prices."""

    def __init__(self, setting: Setting, trials: Trials) -> None:
        self._setting, self._trials = setting, trials
        self._costs: dict[Candidate, float] = {}
        self._sending: dict[Candidate, float] = {}

    def cost(self, candidate: Candidate) -> float:
        """An hour at the middle of prices, without what is sent."""
        known = self._costs.get(candidate)
        if known is None:
            prices = self._setting.plan.spec.prices
            known = self._setting.families[candidate.family].cost(candidate.sizes, prices).total.middle
            self._costs[candidate] = known
        return known

    def guess(self, candidate: Candidate) -> float:
        return max(1e-6, FILL * self._setting.bounds[candidate.family].rate(candidate.sizes))

    def spent(self, point: Point) -> float:
        """An hour of it with what it sends, at its goodput."""
        return point.cost + self.each(point.candidate) * point.goodput

    def each(self, candidate: Candidate) -> float:
        """What is spent an hour for sending one request a second over links that have a price."""
        if all(link.price is None for link in self._setting.loaded.graph.spec.links.values()):
            return 0.0
        if candidate not in self._sending:
            trial = self._trials.trial(candidate, self.guess(candidate))
            verdict = self._trials.verdicts("measures what it found", [trial])[0]
            self._sending[candidate] = self._setting.priced(candidate, verdict).traffic.middle / trial.rate
        return self._sending[candidate]

    def paid(self, point: Point) -> bool:
        """Whether the budget is enough for it, however little it sends."""
        budget = self._setting.plan.spec.budget
        return budget is None or point.cost <= budget

    def capped(self, point: Point) -> Point:
        """With no more goodput than the budget pays for, where it pays for any."""
        budget = self._setting.plan.spec.budget
        each = 0.0 if budget is None else self.each(point.candidate)
        if budget is None or not each or point.cost >= budget:
            return point
        return replace(point, goodput=min(point.goodput, (budget - point.cost) / each))

    def best(self, points: Sequence[Point]) -> Point:
        """By what the plan asks for; what falls short of it only where all do."""
        spec = self._setting.plan.spec

        def worth(point: Point) -> tuple[bool, float, float]:
            if spec.goodput is not None:
                enough = point.goodput >= (1 - SHORT) * spec.goodput
                return enough, -point.cost if enough else point.goodput, point.goodput
            if spec.budget is not None:
                return self.paid(point), point.goodput, -point.cost
            return True, point.bcr, -point.cost

        return max(points, key=worth)
