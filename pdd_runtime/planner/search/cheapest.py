"""The cheapest deployment that serves a rate: bounds say where it cannot be, trials where it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pdd_runtime.planner.search.family import Sizes, neighbours
from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.trial import Verdict
from pdd_runtime.planner.search.trials import Steps, Trials, kept

FILL = 0.85
"""How busy workers are in a deployment that just keeps its promise: where the search begins, nothing more."""
STEP = 0.05
"""Part of a pool's workers that is added where they are too few."""
DEARER = 1.1
"""A way up is followed while it costs at most so many times as much as the best so far: a way down may follow."""
MOST = 60
"""Trials at one rate; only where nearly all choices are alike do they not suffice."""

Cost = Callable[[Candidate], float]


class Cheapest:
    """At one rate, over all families, those first that seem cheapest."""

    def __init__(self, trials: Trials, cost: Cost, rate: float) -> None:
        self._trials, self._cost, self._rate = trials, cost, rate
        self._best: Candidate | None = None
        self._asked = 0

    def find(self) -> Steps[Candidate | None]:
        """None: nothing that may be chosen serves it."""
        for family in self._order():
            yield from self._climb(family)
        return self._best

    @property
    def _limit(self) -> float:
        return math.inf if self._best is None else self._cost(self._best)

    def _order(self) -> list[int]:
        guessed = []
        for family, bounds in enumerate(self._trials.bounds):
            sizes = bounds.least(self._rate, FILL) or bounds.least(self._rate, 1.0)
            if sizes is not None:
                guessed.append((self._cost(Candidate(family, sizes)), family))
        return [family for _, family in sorted(guessed)]

    def _climb(self, family: int) -> Steps[None]:
        """Up until the rate is served, then down."""
        lowest = self._trials.bounds[family].least(self._rate, 1.0)
        if lowest is None or self._cost(Candidate(family, lowest)) >= self._limit:
            return
        here = Candidate(family, self._start(family, lowest))
        while not kept(verdict := (yield from self._holds(here))):
            more = self._more(here, verdict)
            if more is None or self._cost(more) >= DEARER * self._limit or self._asked > MOST:
                return
            here = more
        here = yield from self._down(here)
        if self._cost(here) < self._limit:
            self._best = here

    def _holds(self, candidate: Candidate) -> Steps[Verdict | bool]:
        before = self._trials.done
        verdict = yield from self._trials.holds(candidate, self._rate)
        self._asked += self._trials.done > before
        return verdict

    def _start(self, family: int, lowest: Sizes) -> Sizes:
        """Where others have ended, if they have the same pools; else where workers would be rather busy."""
        choices = self._trials.families[family].choices
        best = self._best
        if best is None or self._trials.families[best.family].pools != tuple(choices):
            sizes = self._trials.bounds[family].least(self._rate, FILL)
            return sizes or tuple(counts[-1] for counts in choices.values())
        return tuple(
            next((count for count in counts if count >= max(size, low)), counts[-1])
            for counts, size, low in zip(choices.values(), best.sizes, lowest, strict=True)
        )

    def _more(self, candidate: Candidate, verdict: Verdict | bool) -> Candidate | None:
        """With more workers in the pool that lacks them most; None: all have as many as they may."""
        family = self._trials.families[candidate.family]
        counts, pools = list(family.choices.values()), family.smallest.spec.pools
        room = [axis for axis, size in enumerate(candidate.sizes) if size < counts[axis][-1]]
        if not room:
            return None

        def lack(axis: int) -> tuple[float, float]:
            if isinstance(verdict, bool):
                return 0.0, -candidate.sizes[axis] / counts[axis][-1]
            late = "tpot" if pools[family.pools[axis]].role == "main" else "ttft"
            return verdict.busy.get(family.pools[axis], 0.0) + (late in verdict.missed), -candidate.sizes[axis]

        axis = max(room, key=lack)
        least = candidate.sizes[axis] + max(1, round(STEP * candidate.sizes[axis]))
        size = next((count for count in counts[axis] if count >= least), counts[axis][-1])
        return candidate._replace(sizes=(*candidate.sizes[:axis], size, *candidate.sizes[axis + 1 :]))

    def _down(self, candidate: Candidate) -> Steps[Candidate]:
        """To what is cheaper and still serves the rate, until no neighbour does; the cheapest first."""
        choices = self._trials.families[candidate.family].choices
        while True:
            for other in sorted(
                (candidate._replace(sizes=sizes) for sizes in neighbours(candidate.sizes, choices)),
                key=lambda each: (self._cost(each), each.sizes),
            ):
                if self._cost(other) >= self._cost(candidate) or self._asked > MOST:
                    return candidate
                if kept((yield from self._holds(other))):
                    candidate = other
                    break
            else:
                return candidate


def cheapest(trials: Trials, cost: Cost, rates: Sequence[float]) -> dict[float, Candidate | None]:
    """For each rate."""
    steps = {rate: Cheapest(trials, cost, rate).find() for rate in rates}
    return trials.together("looks for the cheapest", steps)
