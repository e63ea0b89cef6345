"""A plan's answer: the best deployment, the front, what binds, and what happens when things are otherwise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from pdd_runtime.graph import Graph
from pdd_runtime.planner.cost import Cost, PriceError, bcr
from pdd_runtime.planner.plan_spec import PlanError
from pdd_runtime.planner.prices import Range
from pdd_runtime.planner.search.cheapest import FILL, cheapest
from pdd_runtime.planner.search.crew import Crew
from pdd_runtime.planner.search.family import Family
from pdd_runtime.planner.search.goodput import goodput, goodputs
from pdd_runtime.planner.search.improve import by_bcr, improved, within
from pdd_runtime.planner.search.point import Candidate, Point, front
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.trial import Verdict
from pdd_runtime.planner.search.trials import Told, Trials

LEVELS = 6
"""Rates at which the cheapest deployment is looked for."""
FEW = 16
"""So few deployments are all looked at."""
IDLE = 0.05
"""Of what the bounds allow: whoever breaks the promise at that rate breaks it at any."""
SHORT = 0.03
"""By which part a longer measurement may fall short of the goodput that is needed."""
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Half a 95 % interval in standard errors, for 2, 3, … values (Student's t); 2 for more."""


@dataclass(frozen=True)
class Deployment:
    """One that is shown."""

    family: Family
    candidate: Candidate
    graph: Graph
    cost: Cost
    goodput: float
    """Requests/s."""
    interval: Range
    """Where its goodput lies, by the seeds: 95 %. Of one seed both ends are alike."""
    verdict: Verdict
    """At its goodput."""

    @property
    def bcr(self) -> Range:
        """By the prices' range."""
        return bcr(self.goodput, self.cost)

    @property
    def pools(self) -> dict[str, str]:
        """`10 x 4x8xh100` by pool."""
        pools = self.graph.spec.pools
        return {name: f"{pool.replicas} × {pool.hardware or 'its hardware'}" for name, pool in pools.items()}


@dataclass(frozen=True)
class Found:
    """The answer."""

    best: Deployment
    front: tuple[Deployment, ...]
    """By cost; `best` is among them."""
    given: Deployment | None
    """The graph as it is; None: it keeps the promise at no rate, or something in it has no price."""
    deployments: int
    """How many there were to choose from."""
    trials: int
    """How many simulations that took."""


class Finder:
    """One plan's search, from bounds to finalists."""

    def __init__(self, setting: Setting, crew: Crew, told: Told) -> None:
        self.setting = setting
        effort, choices = setting.plan.spec.effort, setting.choices
        self.trials = Trials(setting.families, setting.bounds, effort, crew, told, choices)
        self._choices = setting.families[:choices]
        self._given: Candidate | None = None
        for given in setting.families[choices:]:
            self._given = Candidate(choices, tuple(counts[0] for counts in given.choices.values()))
        self._costs: dict[Candidate, float] = {}

    def cost(self, candidate: Candidate) -> float:
        """An hour at the middle of prices, without what is sent."""
        known = self._costs.get(candidate)
        if known is None:
            prices = self.setting.plan.spec.prices
            known = self.setting.families[candidate.family].cost(candidate.sizes, prices).total.middle
            self._costs[candidate] = known
        return known

    def find(self) -> Found:
        """Raises `PlanError` where nothing keeps the promise, at the goodput or for the budget that is asked for."""
        points = self._points()
        if not points:
            raise self._hopeless()
        best = self._best(points)
        finalists = [*front([*points, best])]
        if best not in finalists:
            finalists.append(best)
        given = self._as_given()
        chosen, shown = self._finals([*finalists, *given])
        others = tuple(each for each in shown if each.candidate != self._given)
        same = next((each for each in shown if each.candidate == self._given), None)
        return Found(chosen, _undominated(others, chosen), same, self.deployments, self.trials.done)

    def _as_given(self) -> list[Point]:
        if self._given is None:
            return []
        try:
            spent = self.cost(self._given)
        except PriceError:
            return []
        rates = goodputs(self.trials, "measures what it found", [(self._given, self._guess(self._given))])
        return [Point(self._given, rate, spent) for rate in rates.values() if rate > 0]

    @property
    def deployments(self) -> int:
        return sum(math.prod(map(len, family.choices.values())) for family in self._choices)

    def _all(self) -> Iterator[Candidate]:
        for number, family in enumerate(self._choices):
            for sizes in product(*family.choices.values()):
                yield Candidate(number, sizes)

    def _points(self) -> list[Point]:
        """Deployments that keep the promise, with their goodput."""
        need = self.setting.plan.spec.goodput
        if self.deployments <= FEW:
            guesses = {each: self._guess(each) for each in islice(self._all(), FEW)}
        else:
            found = cheapest(self.trials, self.cost, self._levels())
            guesses = {each: rate for rate, each in found.items() if each is not None}
        rates = goodputs(self.trials, "measures what it found", guesses.items())
        if need is not None:
            # What was found to serve a rate does, though bisection may end just below it.
            rates = {each: max(rate, need if guesses[each] == need else 0.0) for each, rate in rates.items()}
        return [Point(each, rate, self.cost(each)) for each, rate in rates.items() if rate > 0]

    def _guess(self, candidate: Candidate) -> float:
        return max(1e-6, FILL * self.setting.bounds[candidate.family].rate(candidate.sizes))

    def _levels(self) -> tuple[float, ...]:
        """Rates from what the smallest deployment can serve to what the largest can; the one that is needed among
        them."""
        smallest, largest = [], []
        for bounds in self.setting.bounds[: len(self._choices)]:
            choices = bounds.family.choices.values()
            smallest.append(bounds.rate(tuple(counts[0] for counts in choices)))
            largest.append(bounds.rate(tuple(counts[-1] for counts in choices)))
        high = FILL * max(largest)
        low = min(max(FILL * min(smallest), high / 10), high)
        rates = {low * (high / low) ** (step / (LEVELS - 1)) for step in range(LEVELS)} if low > 0 else {1e-6}
        need = self.setting.plan.spec.goodput
        return tuple(sorted(rates | ({need} if need is not None else set())))

    def _best(self, points: Sequence[Point]) -> Point:
        spec = self.setting.plan.spec
        where = self.setting.document.locate
        if spec.goodput is not None:
            enough = [point for point in points if point.goodput >= spec.goodput]
            if not enough:
                most = max(points, key=lambda point: point.goodput)
                raise PlanError(
                    f"no deployment serves {spec.goodput:g} requests/s within the SLO",
                    where=where(("spec", "goodput")),
                    why=f"the most is {most.goodput:.3g} requests/s, for {most.cost:.4g} {spec.prices.unit}",
                    fix="allow more workers, faster links or a looser SLO",
                )
            return self._worthiest(enough)
        if spec.budget is not None:
            budget = spec.budget
            paid = [point for point in points if point.cost <= budget]
            if not paid:
                least = min(points, key=lambda point: point.cost)
                raise PlanError(
                    f"no deployment costs at most {budget:g} {spec.prices.unit}",
                    where=where(("spec", "budget")),
                    why=f"the cheapest found costs {least.cost:.4g}, and serves {least.goodput:.3g} requests/s",
                    fix="allow fewer workers, or more money",
                )
            return improved(self.trials, self.cost, self._worthiest(paid), within(budget))
        return improved(self.trials, self.cost, self._worthiest(points), by_bcr)

    def _worthiest(self, points: Sequence[Point]) -> Point:
        """By what the plan asks for; what falls short of it only where all do."""
        spec = self.setting.plan.spec

        def worth(point: Point) -> tuple[bool, float, float]:
            if spec.goodput is not None:
                enough = point.goodput >= (1 - SHORT) * spec.goodput
                return enough, -point.cost if enough else point.goodput, point.goodput
            if spec.budget is not None:
                return point.cost <= spec.budget, point.goodput, -point.cost
            return True, point.bcr, -point.cost

        return max(points, key=worth)

    def _finals(self, points: Sequence[Point]) -> tuple[Deployment, tuple[Deployment, ...]]:
        """The best and all, measured for longer with two seeds. Which is best is decided anew by that, and it gets the
        other seeds."""
        effort = self.setting.plan.spec.effort
        rates = self._longer({point: range(1, 3) for point in points})
        means = {point: statistics.fmean(some) for point, some in rates.items() if all(some)}
        if not means:
            raise self._hopeless()
        again = [Point(point.candidate, rate, point.cost) for point, rate in means.items()]
        chosen = [point for point in again if point.candidate != self._given]
        best = self._worthiest(chosen or again)
        more = self._longer({best: range(3, 1 + effort.seeds)})[best]
        shown: list[Deployment] = []
        values = {point.candidate: some for point, some in rates.items()}
        values[best.candidate] = [*values[best.candidate], *(rate for rate in more if rate)]
        trials = [
            self.trials.trial(point.candidate, statistics.fmean(values[point.candidate]), longer=effort.final, seed=1)
            for point in again
        ]
        verdicts = self.trials.verdicts("measures what is shown", trials)
        for point, trial, verdict in zip(again, trials, verdicts, strict=True):
            shown.append(self._shown(point, trial.rate, _interval(values[point.candidate]), verdict))
        shown.sort(key=lambda each: (each.cost.total.middle, each.goodput))
        return next(each for each in shown if each.candidate == best.candidate), tuple(shown)

    def _longer(self, seeds: Mapping[Point, Iterable[int]]) -> dict[Point, list[float]]:
        longer = self.setting.plan.spec.effort.final
        steps = {
            (point, seed): goodput(self.trials, point.candidate, guess=point.goodput, longer=longer, seed=seed)
            for point, some in seeds.items()
            for seed in some
        }
        rates = self.trials.together("measures what is shown", steps)
        return {point: [rate for (other, _), rate in rates.items() if other == point] for point in seeds}

    def _shown(self, point: Point, rate: float, interval: Range, verdict: Verdict) -> Deployment:
        family = self.setting.families[point.candidate.family]
        graph = family.graph(point.candidate.sizes)
        sent = {link: each * 3600 for link, each in verdict.sent.items()}
        spent = family.cost(point.candidate.sizes, self.setting.plan.spec.prices, sent)
        return Deployment(family, point.candidate, graph, spent, rate, interval, verdict)

    def _hopeless(self) -> PlanError:
        """Nothing keeps the promise at any rate: how near the best of them comes when it is nearly idle."""
        largest = [
            Candidate(number, tuple(counts[-1] for counts in family.choices.values()))
            for number, family in enumerate(self._choices)
        ]
        rates = [max(1e-6, IDLE * self.setting.bounds[each.family].rate(each.sizes)) for each in largest]
        tried = [self.trials.trial(each, rate) for each, rate in zip(largest, rates, strict=True)]
        verdicts = self.trials.verdicts("looks why", tried)
        best = min(verdicts, key=lambda verdict: (len(verdict.missed), verdict.ttft["p90"]))
        slo = self.setting.slo
        tpot = "" if slo.tpot_p90 is None else f", and of {slo.tpot_p90:g} s for each token"
        return PlanError(
            f"no deployment keeps the SLO of {slo.ttft_p90:g} s to the first token{tpot}",
            where=self.setting.document.locate(("spec", "slo")),
            why=f"nearly idle the best has a P90 of {best.ttft['p90']:.3g} s to the first token, and of "
            f"{best.tpot['p90']:.3g} s for each token",
            fix="promise less, or allow hardware with more compute and memory bandwidth",
        )


def _undominated(shown: Sequence[Deployment], best: Deployment) -> tuple[Deployment, ...]:
    """Those that are still worth their money by the longer measurement, and the best."""
    points = {each.candidate: Point(each.candidate, each.goodput, each.cost.total.middle) for each in shown}
    kept = {point.candidate for point in front(list(points.values()))}
    return tuple(each for each in shown if each.candidate in kept or each is best)


def _interval(values: Sequence[float]) -> Range:
    """95 % of the mean, by Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Range(mean, mean)
    student = _STUDENT[len(values) - 2] if len(values) - 2 < len(_STUDENT) else 2.0
    half = student * statistics.stdev(values) / math.sqrt(len(values))
    return Range(max(0.0, mean - half), mean + half)
