"""A plan's answer: the best deployment, the front, what binds, and what happens when things are otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from pdd_runtime.planner.cost import PriceError
from pdd_runtime.planner.plan_spec import PlanError
from pdd_runtime.planner.search.cheapest import FILL, cheapest
from pdd_runtime.planner.search.crew import Crew
from pdd_runtime.planner.search.deployment import Deployment
from pdd_runtime.planner.search.finals import Finals
from pdd_runtime.planner.search.goodput import EXACT, goodputs
from pdd_runtime.planner.search.improve import by_bcr, improved, within
from pdd_runtime.planner.search.point import Candidate, Point, front
from pdd_runtime.planner.search.relay import RelayPays, relay_pays
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.times import NEVER
from pdd_runtime.planner.search.trials import Told, Trials
from pdd_runtime.planner.search.worth import SHORT, Worth

LEVELS = 6
"""Rates at which the cheapest deployment is looked for."""
FEW = 16
"""So few deployments are all looked at."""
AGAIN = 3
"""So often more is looked for where the longer measurement falls short of the goodput that is needed."""
IDLE = 0.05
"""Of what the bounds allow: whoever breaks the promise at that rate breaks it at any."""


@dataclass(frozen=True)
class Found:
    """The answer."""

    best: Deployment
    front: tuple[Deployment, ...]
    """By cost; `best` is among them."""
    given: Deployment | None
    """The graph as it is; None: it keeps the promise at no rate, or something in it has no price."""
    relay: RelayPays
    """Whether a relay pays."""
    deployments: int
    """How many there were to choose from."""
    trials: int
    """How many simulations that took."""


class Finder:
    """One plan's search, from bounds to finalists."""

    def __init__(self, setting: Setting, crew: Crew, told: Told) -> None:
        self.setting = setting
        effort, choices = setting.plan.spec.effort, setting.choices
        self.trials = Trials(setting.families, setting.bounds, effort, crew, told)
        self._choices = range(choices)
        self._given: Candidate | None = None
        for given in setting.families[choices + setting.compared :]:
            self._given = Candidate(given.number, tuple(counts[0] for counts in given.choices.values()))
        self._worth = Worth(setting, self.trials)
        self.cost = self._worth.cost

    def find(self) -> Found:
        """Raises `PlanError` where nothing keeps the promise, at the goodput or for the budget that is asked for."""
        setting, sides = self.setting, self._sides()
        points = {relayed: self._points(families) for relayed, families in sides.items()}
        own = [point for some in points.values() for point in some if self._chosen(point)]
        self._enough(own, self._choices)
        heads: dict[bool, Point] = {}
        faults: dict[bool, str] = {}
        for relayed, some in points.items():
            try:
                heads[relayed] = self._best(some, sides[relayed])
            except PlanError as error:
                faults[relayed] = f"{error.what}: {error.why}"
        found = dict.fromkeys(front([*own, *(head for head in heads.values() if self._chosen(head))]))
        finalists = [*found, *heads.values(), *self._as_given()]
        finals = Finals(setting, self.trials, self._worth)
        shown, bests = finals.measured(finalists, sides)
        aims = dict.fromkeys(bests, setting.plan.spec.goodput or 0.0)
        for _ in range(AGAIN):
            more = []
            for side, best in bests.items():
                aims[side] *= self._short(best)
                more += self._more(best, aims[side], sides[side])
            if not more:
                break
            finalists += more
            shown, bests = finals.measured(finalists, sides)
        return self._found(shown, bests, faults)

    def _short(self, best: Deployment) -> float:
        """So many times more is needed than it serves by the longer measurement; 1: it serves enough."""
        need = self.setting.plan.spec.goodput
        return 1.0 if need is None or best.goodput >= (1 - SHORT) * need else need / best.goodput

    def _more(self, best: Deployment, aim: float, families: Sequence[int]) -> list[Point]:
        """What serves that much of these, where the best of them falls short."""
        if self._short(best) == 1.0:
            return []
        found = cheapest(self.trials, self.cost, [aim], families)[aim]
        return [] if found is None or found == best.candidate else [Point(found, aim, self.cost(found))]

    def _sides(self) -> dict[bool, list[int]]:
        """The families by whether they have a relay: each side is searched by itself, so that it has a best."""
        sides: dict[bool, list[int]] = {}
        for number in range(self.setting.choices + self.setting.compared):
            sides.setdefault(self.setting.relayed(number), []).append(number)
        return sides

    def _chosen(self, point: Point | Deployment) -> bool:
        """Whether the plan lets it be chosen."""
        return point.candidate.family in self._choices

    def _found(
        self, shown: Sequence[Deployment], bests: Mapping[bool, Deployment], faults: Mapping[bool, str]
    ) -> Found:
        heads = {Point(e.candidate, e.goodput, self.cost(e.candidate)): e for e in bests.values() if self._chosen(e)}
        if not heads:
            raise self._hopeless(self._choices)
        best = heads[self._worth.best(list(heads))]
        return Found(
            best=best,
            front=_undominated([each for each in shown if self._chosen(each)], best),
            given=next((each for each in shown if each.candidate == self._given), None),
            relay=relay_pays(self.setting, {side: best for side, best in bests.items() if side not in faults}, faults),
            deployments=self.deployments,
            trials=self.trials.done,
        )

    def _as_given(self) -> list[Point]:
        if self._given is None:
            return []
        try:
            spent = self.cost(self._given)
        except PriceError:
            return []
        rates = goodputs(self.trials, "measures what it found", [(self._given, self._worth.guess(self._given))])
        return [Point(self._given, rate, spent) for rate in rates.values() if rate > 0]

    @property
    def deployments(self) -> int:
        return self._count(self._choices)

    def _count(self, families: Iterable[int]) -> int:
        return sum(math.prod(map(len, self.setting.families[number].choices.values())) for number in families)

    def _points(self, families: Sequence[int]) -> list[Point]:
        """Deployments of these that keep the promise, with their goodput."""
        need = self.setting.plan.spec.goodput
        if self._count(families) <= FEW:
            every = (
                Candidate(number, sizes)
                for number in families
                for sizes in product(*self.setting.families[number].choices.values())
            )
            guesses = {each: self._worth.guess(each) for each in every}
        else:
            found = cheapest(self.trials, self.cost, self._levels(families), families)
            self._near_budget(found, families)
            guesses = {each: rate for rate, each in found.items() if each is not None}
        rates = goodputs(self.trials, "measures what it found", guesses.items())
        if need is not None:
            # What was found to serve a rate does, though bisection may end just below it.
            rates = {each: max(rate, need if guesses[each] == need else 0.0) for each, rate in rates.items()}
        return [self._worth.capped(Point(each, rate, self.cost(each))) for each, rate in rates.items() if rate > 0]

    def _near_budget(self, found: dict[float, Candidate | None], families: Sequence[int]) -> None:
        """Adds the cheapest at rates ever nearer to the highest that the budget pays for: between two levels lies more
        than their neighbours show."""
        budget = self.setting.plan.spec.budget
        if budget is None:
            return
        cost = {rate: math.inf if each is None else self.cost(each) for rate, each in found.items()}
        low = max((rate for rate, spent in cost.items() if spent <= budget), default=min(cost) / 2)
        high = min((rate for rate in cost if rate > low and cost[rate] > budget), default=low)
        while high > low * (1 + 2 * EXACT):
            middle = math.sqrt(low * high)
            found |= cheapest(self.trials, self.cost, [middle], families)
            each = found[middle]
            low, high = (low, middle) if each is None or self.cost(each) > budget else (middle, high)

    def _levels(self, families: Sequence[int]) -> tuple[float, ...]:
        """Rates from what the smallest deployment can serve to what the largest can; the one that is needed among
        them."""
        smallest, largest = [], []
        for bounds in map(self.setting.bounds.__getitem__, families):
            choices = bounds.family.choices.values()
            smallest.append(bounds.rate(tuple(counts[0] for counts in choices)))
            largest.append(bounds.rate(tuple(counts[-1] for counts in choices)))
        high = FILL * max(largest)
        low = min(max(FILL * min(smallest), high / 10), high)
        rates = {low * (high / low) ** (step / (LEVELS - 1)) for step in range(LEVELS)} if low > 0 else {1e-6}
        need = self.setting.plan.spec.goodput
        return tuple(sorted(rates | ({need} if need is not None else set())))

    def _enough(self, points: Sequence[Point], families: Sequence[int]) -> list[Point]:
        """Those that are what the plan asks for. Raises `PlanError` where none is."""
        spec = self.setting.plan.spec
        where = self.setting.document.locate
        if not points:
            raise self._hopeless(families)
        if spec.goodput is not None:
            enough = [point for point in points if point.goodput >= spec.goodput]
            if not enough:
                most = max(points, key=lambda point: point.goodput)
                spent = self._worth.spent(most)
                raise PlanError(
                    f"no deployment serves {spec.goodput:g} requests/s within the SLO",
                    where=where(("spec", "goodput")),
                    why=f"the most found is {most.goodput:.3g} requests/s, for {spent:.4g} {spec.prices.unit}",
                    fix="allow more workers, faster links or a looser SLO",
                )
            return enough
        if spec.budget is not None:
            paid = [point for point in points if self._worth.paid(point)]
            if not paid:
                least = min(point.cost for point in points)
                raise PlanError(
                    f"no deployment costs at most {spec.budget:g} {spec.prices.unit}",
                    where=where(("spec", "budget")),
                    why=f"the cheapest found that keeps the SLO costs {least:.4g}",
                    fix="allow fewer workers, or more money",
                )
            return paid
        return list(points)

    def _best(self, points: Sequence[Point], families: Sequence[int]) -> Point:
        """Raises `PlanError` where none is what the plan asks for."""
        spec = self.setting.plan.spec
        best = self._worth.best(self._enough(points, families))
        if spec.goodput is not None:
            return best
        if spec.budget is not None:
            each = self._worth.each(best.candidate)
            return improved(self.trials, self.cost, best, within(spec.budget, each), self._worth.capped)
        return improved(self.trials, self.cost, best, by_bcr)

    def _hopeless(self, families: Iterable[int]) -> PlanError:
        """None of these keeps the promise at any rate: how near the best of them comes when it is nearly idle."""
        largest = [
            Candidate(number, tuple(counts[-1] for counts in self.setting.families[number].choices.values()))
            for number in families
        ]
        rates = [max(1e-6, IDLE * self.setting.bounds[each.family].rate(each.sizes)) for each in largest]
        tried = [self.trials.trial(each, rate) for each, rate in zip(largest, rates, strict=True)]
        verdicts = self.trials.verdicts("looks why", tried)
        best = min(verdicts, key=lambda verdict: (len(verdict.missed), verdict.ttft.get("p90", NEVER)))
        slo = self.setting.slo
        tpot = "" if slo.tpot_p90 is None else f", and of {slo.tpot_p90:g} s for each token"
        seen = f"nearly idle the best has a P90 of {best.ttft['p90']:.3g} s to the first token" if best.ttft else ""
        paced = f", and of {best.tpot['p90']:.3g} s for each token" if best.tpot else ""
        return PlanError(
            f"no deployment keeps the SLO of {slo.ttft_p90:g} s to the first token{tpot}",
            where=self.setting.document.locate(("spec", "slo")),
            why=f"{seen}{paced}" or "nearly idle the best answers nobody",
            fix="promise less, or allow hardware with more compute and memory bandwidth",
        )


def _undominated(shown: Sequence[Deployment], best: Deployment) -> tuple[Deployment, ...]:
    """Those that are still worth their money by the longer measurement, and the best."""
    points = {each.candidate: Point(each.candidate, each.goodput, each.cost.total.middle) for each in shown}
    kept = {point.candidate for point in front(list(points.values()))}
    return tuple(each for each in shown if each.candidate in kept or each is best)
