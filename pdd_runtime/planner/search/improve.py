"""From a good deployment to the best near it."""

from __future__ import annotations

import math
from collections.abc import Callable

from pdd_runtime.planner.search.family import neighbours
from pdd_runtime.planner.search.goodput import EXACT, goodputs
from pdd_runtime.planner.search.point import Candidate, Point
from pdd_runtime.planner.search.trials import Trials

ROUNDS = 12
Needed = Callable[[float, Point], float | None]
"""The rate at which a deployment of such a cost is as good as a point; None: it is so at no rate."""


def by_bcr(cost: float, best: Point) -> float | None:
    return best.bcr * cost


def within(budget: float, each: float = 0.0) -> Needed:
    """The most goodput for a budget, where what one request a second sends costs `each`."""
    return lambda cost, best: best.goodput if cost + each * best.goodput <= budget else None


def improved(
    trials: Trials,
    cost: Callable[[Candidate], float],
    best: Point,
    needed: Needed,
    capped: Callable[[Point], Point] = lambda point: point,
) -> Point:
    """One trial says of each neighbour whether it can be better; of those that can the goodput is found, and
    `capped`."""
    for _ in range(ROUNDS):
        choices = trials.families[best.candidate.family].choices
        tries = []
        for sizes in neighbours(best.candidate.sizes, choices):
            candidate = best.candidate._replace(sizes=sizes)
            rate = needed(cost(candidate), best)
            if rate is None:
                continue
            rate *= 1 + EXACT
            family = candidate.family
            if trials.bounds[family].rate(sizes) >= rate and trials.known.keeps(family, sizes, rate) is not False:
                tries.append(trials.trial(candidate, rate))
        verdicts = trials.verdicts("improves it", tries)
        better = [(Candidate(t.family, t.sizes), t.rate) for t, v in zip(tries, verdicts, strict=True) if v.kept]
        if not better:
            break
        rates = goodputs(trials, "improves it", better)
        points = [capped(Point(c, rate, cost(c))) for c, rate in rates.items()]
        other = max(points, key=lambda point: point.goodput / (needed(point.cost, best) or math.inf))
        if other.goodput <= (needed(other.cost, best) or math.inf):
            break
        best = other
    return best
