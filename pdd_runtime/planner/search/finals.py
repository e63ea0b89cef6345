"""What is shown, measured for longer than the search does."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from pdd_runtime.planner.prices import Range
from pdd_runtime.planner.search.deployment import Deployment, interval
from pdd_runtime.planner.search.goodput import goodput
from pdd_runtime.planner.search.point import Point
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.trials import Trials
from pdd_runtime.planner.search.worth import Worth

FIRST = (1, 2)
"""Seeds of all; the search's own is 0."""
Rates = dict[int, float]
"""Goodputs by seed."""


class Finals:
    """With other seeds than the search's own."""

    def __init__(self, setting: Setting, trials: Trials, worth: Worth) -> None:
        self._setting, self._trials, self._worth = setting, trials, worth

    def measured(
        self, points: Iterable[Point], sides: Mapping[bool, Collection[int]]
    ) -> tuple[tuple[Deployment, ...], dict[bool, Deployment]]:
        """Those that keep the promise by all first seeds, by cost; and of each side, whose families' numbers these are,
        the one that is best by that. Those get the other seeds."""
        once = {point.candidate: point for point in points}.values()
        rates = {point: some for point, some in self._rates(dict.fromkeys(once, FIRST)).items() if all(some.values())}
        before = {_again(point, some): point for point, some in rates.items()}
        best = {
            side: before[self._worth.best(own)]
            for side, families in sides.items()
            if (own := [point for point in before if point.candidate.family in families])
        }
        seeds = range(FIRST[-1] + 1, 1 + self._setting.plan.spec.effort.seeds)
        for point, others in self._rates(dict.fromkeys(best.values(), seeds)).items():
            rates[point] |= {seed: rate for seed, rate in others.items() if rate}
        shown = self._shown(rates)
        in_order = sorted(shown.values(), key=lambda each: (each.cost.total.middle, each.goodput))
        return tuple(in_order), {side: shown[point] for side, point in best.items()}

    def _rates(self, seeds: Mapping[Point, Iterable[int]]) -> dict[Point, Rates]:
        longer = self._setting.plan.spec.effort.final
        steps = {
            (point, seed): goodput(self._trials, point.candidate, guess=point.goodput, longer=longer, seed=seed)
            for point, some in seeds.items()
            for seed in some
        }
        rates = self._trials.together("measures what is shown", steps)
        found: dict[Point, Rates] = {point: {} for point in seeds}
        for (point, seed), rate in rates.items():
            found[point][seed] = self._worth.capped(replace(point, goodput=rate)).goodput
        return found

    def _shown(self, rates: Mapping[Point, Rates]) -> dict[Point, Deployment]:
        longer, families = self._setting.plan.spec.effort.final, self._setting.families
        again = [_again(point, some) for point, some in rates.items()]
        trials = [self._trials.trial(point.candidate, point.goodput, longer=longer, seed=FIRST[0]) for point in again]
        verdicts = self._trials.verdicts("measures what is shown", trials)
        return {
            point: Deployment(
                family=families[point.candidate.family],
                candidate=point.candidate,
                graph=families[point.candidate.family].graph(point.candidate.sizes),
                cost=self._setting.priced(point.candidate, verdict),
                goodput=now.goodput,
                interval=Range(max(0.0, around.low), around.high),
                verdict=verdict,
                rates=some,
            )
            for (point, some), now, verdict in zip(rates.items(), again, verdicts, strict=True)
            if (around := interval(list(some.values())))
        }


def _again(point: Point, rates: Rates) -> Point:
    """With the mean of what it served by the seeds."""
    return Point(point.candidate, statistics.fmean(rates.values()), point.cost)
